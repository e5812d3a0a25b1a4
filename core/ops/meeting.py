"""Which extents the operators of a graph need to be equal, as their type rules find out.

A rule compares the extents that have to be equal by `Infer.agree`, or broadcasts them. Numbers that differ are refused
there. Where a symbol is involved, a run decides; this module collects what it has to decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

from core.ir.dim import Dim
from core.ir.graph import Array, Graph, Node, Value
from core.ops import registry

Pair: TypeAlias = tuple[Dim, Dim]


@dataclass(frozen=True, slots=True)
class Met:
    """Pairs of extents that are not known to be equal, each once, in the order of the nodes."""

    equal: tuple[Pair, ...]  # no run succeeds unless they are equal
    broadcast: tuple[Pair, ...]  # a run succeeds, too, where one of them is 1


@dataclass(frozen=True, slots=True)
class _Notes:
    equal: dict[Pair, None] = field(default_factory=dict)
    broadcast: dict[Pair, None] = field(default_factory=dict)


class _Noting(registry.Infer):
    """The view of `infer` that notes what meets."""

    def __init__(self, op: registry.OpDef, node: Node, known: Mapping[Value, Array], notes: _Notes) -> None:
        super().__init__(op, node, known)
        self._notes = notes

    def agree(self, one: Dim, other: Dim) -> bool:
        self._notes.equal.update(dict.fromkeys(_open_pairs((one, other))))
        return super().agree(one, other)

    def broadcast(self, dims: Sequence[Dim]) -> None:
        self._notes.broadcast.update(dict.fromkeys(_open_pairs(dims)))


def _open_pairs(dims: Sequence[Dim]) -> Iterator[Pair]:
    """The pairs of different dimensions, of which a symbol is in one at least."""
    pairs = combinations(dict.fromkeys(dims), 2)
    return (pair for pair in pairs if not all(isinstance(dim, int) for dim in pair))


def met_in(graph: Graph, known: Mapping[Value, Array]) -> Met:
    """What meets in the nodes that compute outputs of a graph. `known` is what `infer_graph` returned for it."""
    notes = _Notes()
    for node in graph.live_nodes():
        op = registry.get(node.op)
        op.infer(_Noting(op, node, known, notes))
    return Met(tuple(notes.equal), tuple(notes.broadcast))
