"""Which states are updated in place: their next value is computed straight into their own memory."""

from __future__ import annotations

from core.ir.graph import Graph, State, Value, node_reads
from core.plan.choice import Choice


def updated_in_place(graph: Graph, choice: Choice) -> dict[Value, State]:
    """The states whose memory may take the value that a kernel computes, by that value.

    Nothing may read a state's old value after the kernel; the kernel itself may, where it reads every element before it
    writes the one in its place.
    """
    position = {node: at for at, node in enumerate(choice.nodes)}
    reads: dict[Value, int] = {}
    for at, node in enumerate(choice.nodes):
        reads.update(dict.fromkeys(map(choice.root, node_reads(node)), at))
    kept = {choice.root(value) for value in graph.live_outs()}
    outputs = {choice.root(value) for value in graph.outputs}
    found: dict[Value, State] = {}
    for state in graph.states:
        new = choice.root(state.update)
        if new.producer not in choice.calls or new.producer is None or new in found or new in outputs:
            continue
        last = reads.get(state.value, -1)
        late = last > position[new.producer] or state.value in kept
        alike = new.type == state.value.type
        if alike and not late and (last < position[new.producer] or _writes_behind(choice, new, state.value)):
            found[new] = state
    return found


def _writes_behind(choice: Choice, new: Value, old: Value) -> bool:
    """Whether the kernel reads each element of the old value before it writes the new one in its place."""
    node = new.producer
    if node is None or not (choice.calls[node].pointwise or new is node.output):
        return False
    reads = [i for i, value in enumerate(node.inputs) if value is not None and choice.root(value) is old]
    return bool(reads) and all(choice.may_overwrite(node, index) for index in reads)
