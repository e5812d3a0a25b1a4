"""Structured pruning: removes channels of layers, and heads of attention, with all that depends on them.

The channels of least magnitude go (Li et al. 2017, https://arxiv.org/abs/1608.08710). The result is an ordinary smaller
graph: other kernels, formats or runtimes are not needed. Usually it is trained further afterwards.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lathe.core.compress.axis_rules import is_depthwise, slices_of
from lathe.core.compress.channel_groups import ChannelAnalysis, ChannelGroup, find_groups, importance
from lathe.core.compress.products import check_float, check_skipped
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim, TensorType
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import forget_types, infer_graph
from lathe.core.passes.pipeline import Options, required_passes, run_passes

Measure = Literal["l1", "l2"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(frozen=True)
class ChannelPruning:
    """The choices of structured pruning.

    `share` of the channels of each group is removed, rounded down so that the rest is a multiple of `multiple` where
    that is possible, and at least one channel. `measure`: the channels with the least sum of magnitudes ("l1") or of
    squares ("l2") of the weights that compute them go. The channels that the products named in `skip` compute stay.
    UnsupportedError for another `measure`, unless 0 < `share` < 1, and for a `multiple` below 1.
    """

    share: float = 0.5
    measure: Measure = "l2"
    multiple: int = 1
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UnsupportedError(f"share: expected more than 0, below 1, got {self.share}")
        if self.measure not in MEASURES:
            raise UnsupportedError(f"measure: expected one of {', '.join(MEASURES)}, got {self.measure!r}")
        if self.multiple < 1:
            raise UnsupportedError(f"multiple: expected at least 1, got {self.multiple}")


@dataclass(frozen=True)
class GroupChoice:
    """A group of channels: the names of the products that compute them, and their number before and after."""

    name: str
    before: int
    after: int


DEFAULTS = ChannelPruning()


def remove_channels(graph: Graph, options: ChannelPruning = DEFAULTS) -> tuple[Graph, list[GroupChoice]]:
    """A copy of `graph` without some channels of its layers, and the choice for each group of them.

    Parameters are folded first. Channels that depend on each other, by sums, concatenations, normalizations, flattening
    or heads, are removed together. Inputs and outputs keep their shapes. UnsupportedError if a name in `options.skip`
    names no node, if no channel can be removed, or if the graph computes with integers already.
    """
    analysis, removed, choices = _choose(graph, options)
    return cut(analysis, removed), choices


def check_channels(graph: Graph, options: ChannelPruning = DEFAULTS) -> None:
    """UnsupportedError if a name in `options.skip` names no node of `graph`, or if no channel can be removed.

    Also if it computes with integers already.
    """
    _choose(graph, options)


def _choose(graph: Graph, options: ChannelPruning) -> tuple[ChannelAnalysis, frozenset[int], list[GroupChoice]]:
    """The analysis of a prepared copy of `graph`, the channels to remove, and the choice for each group."""
    check_float(graph)
    prepared, _ = run_passes(graph, required_passes(Options()))
    _separate_constants(prepared)
    infer_graph(prepared)
    check_skipped(prepared, options.skip)
    analysis = find_groups(prepared)
    choices, removed = [], set[int]()
    for group in analysis.groups:
        if options.skip & {node.name for node, _ in group.producers}:
            continue
        going = _least_important(analysis, group, options)
        removed |= going
        choices.append(GroupChoice(group.name, len(group.channels), len(group.channels) - len(going)))
    if not removed:
        raise UnsupportedError("expected layers with channels that can be removed, got none")
    return analysis, frozenset(removed), choices


def _separate_constants(graph: Graph) -> None:
    """Give each node a constant of its own where several nodes read one vector or number.

    Equal vectors, such as biases of 0, are stored once; they would tie layers that have nothing else in common.
    """
    readers = graph.uses()
    for value, array in list(graph.constants.items()):
        if array.ndim > 1 or value in graph.outputs:
            continue
        for node in readers.get(value, ())[1:]:
            copy = graph.add_constant(array, value.name)
            place = node.inputs.index(value) if value in node.inputs else None
            if place is not None:
                node.inputs[place] = copy


def _least_important(analysis: ChannelAnalysis, group: ChannelGroup, options: ChannelPruning) -> set[int]:
    count = len(group.channels)
    rest = max(count - int(count * options.share + 1e-9), 1)
    if count >= options.multiple:
        rest = min(-(-rest // options.multiple) * options.multiple, count)
    order = np.argsort(importance(analysis, group, MEASURES.index(options.measure) + 1), kind="stable")
    return {group.channels[place] for place in order[: count - rest]}


def cut(analysis: ChannelAnalysis, removed: frozenset[int]) -> Graph:
    """A copy of the analysed graph without the channels `removed` (roots of positions), with new types."""
    graph = analysis.graph.clone()
    copies = dict(zip(analysis.graph.values(), graph.values(), strict=True))
    for value in analysis.graph.constants:
        array = graph.constants[copies[value]]
        for axis in range(array.ndim):
            kept = analysis.kept(value, axis, removed)
            if kept is not None and not kept.all():
                array = np.compress(kept, array, axis)
        if array.shape != value.shape:
            array = np.ascontiguousarray(array)
            array.setflags(write=False)
            graph.constants[copies[value]] = array
            copies[value].type = TensorType(value.dtype, array.shape)
    for before, after in zip(analysis.graph.nodes, graph.nodes, strict=True):
        _adapt(analysis, removed, before, after)
    forget_types(graph)
    infer_graph(graph)
    verify(graph, "removing channels")
    return graph


def _adapt(analysis: ChannelAnalysis, removed: frozenset[int], before: Node, after: Node) -> None:
    """Change the attributes of a node that hold numbers of channels."""
    if before.op == "Conv" and is_depthwise(before):
        after.attrs["group"] = _extent(analysis, removed, before.required_input(0), 1)
    elif before.op == "Reshape":
        target = before.attrs.get("shape")
        assert isinstance(target, tuple), "axis_rules: a computed shape freezes all axes"
        extents = [_extent(analysis, removed, before.output, axis) for axis in range(len(target))]
        pairs = zip(target, before.output.shape, extents, strict=True)
        after.attrs["shape"] = tuple(extent if given == known else given for given, known, extent in pairs)
    elif before.op == "Split" and isinstance(before.attrs.get("split"), tuple):
        axis = before.attrs.get("axis", 0)
        assert isinstance(axis, int), "type inference checks it"
        after.attrs["split"] = tuple(_extent(analysis, removed, output, axis) for output in before.outputs)
    elif before.op == "Slice" and (taken := slices_of(before)) is not None:
        value = before.required_input(0)
        kept = {axis: analysis.kept(value, axis, removed) for axis in taken}
        counts = {axis: np.concatenate(([0], np.cumsum(found))) for axis, found in kept.items() if found is not None}
        after.attrs["axes"] = tuple(taken)
        after.attrs["starts"] = tuple(int(counts[axis][each.start]) for axis, each in taken.items())
        after.attrs["ends"] = tuple(int(counts[axis][each.stop]) for axis, each in taken.items())
        after.attrs["steps"] = (1,) * len(taken)


def _extent(analysis: ChannelAnalysis, removed: Collection[int], value: Value, axis: int) -> Dim:
    """The extent of an axis after the removal; a symbolic one as it is."""
    kept = analysis.kept(value, axis, frozenset(removed))
    extent = value.shape[axis]
    return int(kept.sum()) if kept is not None else extent
