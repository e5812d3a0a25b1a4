"""Which states are updated in place: their next value is computed straight into their own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from core.ir.graph import Graph, Node, State, Value, node_reads
from core.kernels.catalog import KernelCall


def updated_in_place(
    graph: Graph, nodes: Sequence[Node], calls: Mapping[Node, KernelCall], root: Callable[[Value], Value]
) -> dict[Value, State]:
    """The states whose memory may take the value that a kernel computes, by that value.

    Nothing may read a state's old value after the kernel; the kernel itself may, where it reads every element before it
    writes the one in its place. `root` gives the value whose bytes a view looks at.
    """
    position = {node: at for at, node in enumerate(nodes)}
    reads: dict[Value, int] = {}
    for at, node in enumerate(nodes):
        reads.update(dict.fromkeys(map(root, node_reads(node)), at))
    kept = {root(value) for value in graph.live_outs()}
    found: dict[Value, State] = {}
    for state in graph.states:
        new = root(state.update)
        call = calls.get(new.producer) if new.producer is not None else None
        if new.producer is None or call is None or new in found or new in map(root, graph.outputs):
            continue
        last = reads.get(state.value, -1)
        late = last > position[new.producer] or state.value in kept
        alike = new.type == state.value.type
        if alike and not late and (last < position[new.producer] or _writes_behind(call, new, state.value, root)):
            found[new] = state
    return found


def _writes_behind(call: KernelCall, new: Value, old: Value, root: Callable[[Value], Value]) -> bool:
    """Whether the kernel reads each element of the old value before it writes the new one in its place."""
    node = new.producer
    if node is None or not (call.pointwise or new is node.output):
        return False
    indices = [i for i, value in enumerate(node.inputs) if value is not None and root(value) is old]
    return all(index in call.inplace for index in indices)
