"""`ChannelGroup`: channels of layers that depend on each other in the same way, each of which can be removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.axis_labels import AxisLabels
from lathe.core.compress.axis_rules import tie_axes
from lathe.core.compress.products import CHANNEL_AXIS
from lathe.core.ir.graph import Array, Graph, Node, Value

Place = tuple[Value, int]  # a constant, and one of its axes


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that can be removed one by one, with all that depends on them: slices of the constants at `places`.

    `channels` are their roots (`AxisLabels.roots`). `producers` are the products whose results have these channels, and
    the axis of their weights.
    """

    channels: tuple[int, ...]
    places: frozenset[Place]
    producers: tuple[tuple[Node, Place], ...]

    @property
    def name(self) -> str:
        """The names of the products that compute the channels."""
        return " + ".join(node.name or node.output.name for node, _ in self.producers)


@dataclass(frozen=True)
class ChannelAnalysis:
    """The groups of a graph, and the roots of the positions along the axes of its values."""

    graph: Graph
    labels: AxisLabels
    groups: tuple[ChannelGroup, ...]

    def kept(self, value: Value, axis: int, removed: frozenset[int]) -> NDArray[np.bool_] | None:
        """Which positions along an axis stay if the channels `removed` go; None if the extent is not a number."""
        found = self.labels.of(value, axis)
        return None if found is None else ~np.isin(self.labels.roots(found), list(removed))


def find_groups(graph: Graph) -> ChannelAnalysis:
    """The groups of channels of a graph whose types are inferred.

    Left out are channels that an input, an output or an operator without a rule needs (`axis_rules.py`), and those that
    no Conv, MatMul or Gemm with constant weights computes.
    """
    labels = tie_axes(graph)
    places: dict[int, set[Place]] = {}
    for value in graph.constants:
        for axis in range(len(value.shape)):
            found = labels.of(value, axis)
            for root in set() if found is None else set(labels.roots(found).tolist()):
                if not labels.is_frozen(root):
                    places.setdefault(root, set()).add((value, axis))
    by_places: dict[frozenset[Place], list[int]] = {}
    for root, touched in places.items():
        by_places.setdefault(frozenset(touched), []).append(root)
    producers = _producers(graph)
    groups = []
    for common, channels in by_places.items():
        computing = tuple((node, place) for place, nodes in producers.items() if place in common for node in nodes)
        if computing and len(channels) > 1:
            groups.append(ChannelGroup(tuple(sorted(channels)), common, computing))
    return ChannelAnalysis(graph, labels, tuple(groups))


def _producers(graph: Graph) -> Mapping[Place, list[Node]]:
    """The products that compute channels from constant weights, by the weights and their axis of output channels."""
    found: dict[Place, list[Node]] = {}
    for node in graph.nodes:
        weights = node.input(1)
        array = graph.constant_of(weights) if node.op in CHANNEL_AXIS else None
        if weights is not None and array is not None and array.ndim >= 2:
            found.setdefault((weights, CHANNEL_AXIS[node.op](node) % array.ndim), []).append(node)
    return found


def importance(analysis: ChannelAnalysis, group: ChannelGroup, power: int) -> NDArray[np.float64]:
    """For each channel the sum of |weight|^power over the weights that compute it.

    Each product counts relative to its mean.
    """
    total = np.zeros(len(group.channels))
    for _, (weights, axis) in group.producers:
        array: Array = analysis.graph.constants[weights]
        others = tuple(each for each in range(array.ndim) if each != axis)
        sums = (np.abs(array.astype(np.float64)) ** power).sum(axis=others)
        found = analysis.labels.of(weights, axis)
        assert found is not None, "extents of constants are numbers"
        roots = analysis.labels.roots(found)
        places = np.searchsorted(group.channels, roots).clip(max=len(group.channels) - 1)
        is_ours = np.asarray(group.channels)[places] == roots
        by_channel = np.bincount(places[is_ours], sums[is_ours], len(group.channels))
        total += by_channel / max(float(by_channel.mean()), 1e-30)
    return total
