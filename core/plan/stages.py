"""Stages: runs of steps that no data ties together, so that the threads of a run need no barrier between them.

A thread that finds no more work in one step goes on to the next one of its stage while others are still busy: branches
of a graph run side by side, and no thread waits for the last tile of every step. All steps of a stage count as one
moment of time, so nothing that one of them uses shares memory with what another one writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from typing import TypeAlias

from core.ir.graph import Node, Value, node_reads

Home: TypeAlias = Callable[[Value], Hashable]


def alone(nodes: Sequence[Node]) -> dict[Node, int]:
    """Every node in a stage of its own."""
    return {node: stage for stage, node in enumerate(nodes)}


def stages(
    nodes: Sequence[Node], kernels: Set[Node], barred: Set[Node], home: Home, parts: Set[Value]
) -> dict[Node, int]:
    """The stage of every node, counted from zero in the order of `nodes`, which each stage is a run of.

    `barred` nodes have a stage to themselves; what is neither one of them nor of `kernels` does nothing when it is its
    turn. `home` names the memory of a value: values of one name may share bytes. Only `parts` (values inside others)
    are written to one memory by several nodes without touching each other's bytes.
    """
    found: dict[Node, int] = {}
    read: set[Hashable] = set()
    written: set[Hashable] = set()
    stage, closed = 0, False
    for node in nodes:
        if node in kernels or node in barred:
            reads, writes = set(map(home, node_reads(node))), set(map(home, node.outputs))
            apart = all(value in parts for value in node.outputs)
            tied = reads & written or writes & read or (writes & written and not apart)
            if tied or closed or node in barred:
                stage, read, written = stage + 1, set(), set()
            closed = node in barred
            read |= reads
            written |= writes
        found[node] = stage
    return found
