"""Collects the extents that the operators of a graph need to be equal, by running their type rules.

A rule compares extents that must be equal by `Infer.agree`, or broadcasts them by `Infer.broadcast`. Different numbers
are an error there. Whether symbols are equal is known only in a run; this module collects these pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ops.opdef import registry

Pair: TypeAlias = tuple[Dim, Dim]


@dataclass(frozen=True, slots=True)
class MeetingExtents:
    """Pairs of extents that are not known to be equal, without duplicates, in the order of the nodes."""

    equal: tuple[Pair, ...]  # a run fails unless the two are equal
    broadcast: tuple[Pair, ...]  # a run fails unless the two are equal, or one of them is 1


@dataclass(frozen=True, slots=True)
class _Pairs:
    equal: dict[Pair, None] = field(default_factory=dict)
    broadcast: dict[Pair, None] = field(default_factory=dict)


class _Recording(registry.Infer):
    """A view for `infer` that records the extents that must be equal, and those that must broadcast."""

    def __init__(self, op: registry.OpDef, node: Node, known: Mapping[Value, Array], pairs: _Pairs) -> None:
        super().__init__(op, node, known)
        self._pairs = pairs

    def agree(self, one: Dim, other: Dim) -> bool:
        self._pairs.equal.update(dict.fromkeys(_undecided_pairs((one, other))))
        return super().agree(one, other)

    def broadcast(self, dims: Sequence[Dim]) -> None:
        self._pairs.broadcast.update(dict.fromkeys(_undecided_pairs(dims)))


def _undecided_pairs(dims: Sequence[Dim]) -> Iterator[Pair]:
    """The pairs of different dimensions of which at least one has a symbol."""
    pairs = combinations(dict.fromkeys(dims), 2)
    return (pair for pair in pairs if not all(isinstance(dim, int) for dim in pair))


def meeting_extents(graph: Graph, known: Mapping[Value, Array]) -> MeetingExtents:
    """The pairs of extents that live nodes of a graph need to be equal, or to broadcast, and that may differ.

    `known` is the result of `infer_graph` for the graph. Nodes in bodies are not included.
    """
    pairs = _Pairs()
    for node in graph.live_nodes():
        op = registry.get(node.op)
        op.infer(_Recording(op, node, known, pairs))
    return MeetingExtents(tuple(pairs.equal), tuple(pairs.broadcast))
