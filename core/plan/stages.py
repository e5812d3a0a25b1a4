"""Stages: consecutive steps without data dependences, so that the threads need no barrier between them.

A thread that finds no more work in one step continues with the next step of the stage while other threads are still
busy. So branches of a graph run concurrently, and the threads do not wait for the last tile of every step. For
lifetimes, all steps of a stage have the same time: no step uses bytes that another step of the stage writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from typing import TypeAlias

from lathe.core.ir.graph import Node, Value, node_needs

MemoryOf: TypeAlias = Callable[[Value], Hashable]


def separate_stages(nodes: Sequence[Node]) -> dict[Node, int]:
    """The stage of every node, counted from 0, if each node has a stage of its own."""
    return {node: stage for stage, node in enumerate(nodes)}


def concurrent_stages(
    nodes: Sequence[Node], kernels: Set[Node], barred: Set[Node], home: MemoryOf, parts: Set[Value]
) -> dict[Node, int]:
    """The stage of every node, counted from 0 (1 if the first is barred); a stage is a run of consecutive nodes.

    A node begins a new stage if it reads memory that the stage's nodes write, or writes memory that they read or write,
    or runs after one of them by a control edge.
    `barred` nodes (fallbacks) have a stage to themselves. Nodes that are neither in `kernels` nor in `barred` have no
    work, and the stage of the node before. `home` returns an identifier of the memory of a value: values with the same
    identifier may share bytes. Only `parts` (windows of other values) may be written to the same memory in one stage,
    because they are disjoint.
    """
    found: dict[Node, int] = {}
    read: set[Hashable] = set()
    written: set[Hashable] = set()
    stage, closed = 0, False
    for node in nodes:
        if node in kernels or node in barred:
            reads, writes = set(map(home, node_needs(node))), set(map(home, node.outputs))
            is_disjoint = all(value in parts for value in node.outputs)
            depends = reads & written or writes & read or (writes & written and not is_disjoint)
            if depends or closed or node in barred:
                stage, read, written = stage + 1, set(), set()
            closed = node in barred
            read |= reads
            written |= writes
        found[node] = stage
    return found
