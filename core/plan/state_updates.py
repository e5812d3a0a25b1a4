"""Finds the states that are updated in place: a kernel writes their next value directly into their memory."""

from __future__ import annotations

from lathe.core.ir.graph import Graph, State, Value, node_reads
from lathe.core.plan.kernel_choice import KernelChoice


def states_updated_in_place(graph: Graph, choice: KernelChoice) -> dict[Value, State]:
    """The states whose next value a kernel may write directly into their memory, by the value that the kernel computes.

    That value is the next value itself, or the source of which the next value is a view. It has the type of the state,
    and is neither an output nor the next value of an earlier state. The old value may not be an output or the next
    value of a state, and no node may read it after that kernel. The kernel itself may read the old value, if it
    reads every element before it writes the element with the same index.
    """
    position = {node: at for at, node in enumerate(choice.nodes)}
    last_reads: dict[Value, int] = {}
    for at, node in enumerate(choice.nodes):
        last_reads.update(dict.fromkeys(map(choice.root, node_reads(node)), at))
    live_outs = {choice.root(value) for value in graph.live_outs()}
    outputs = {choice.root(value) for value in graph.outputs}
    found: dict[Value, State] = {}
    for state in graph.states:
        new = choice.root(state.update)
        if new.producer not in choice.calls or new.producer is None or new in found or new in outputs:
            continue
        last = last_reads.get(state.value, -1)
        is_read_later = last > position[new.producer] or state.value in live_outs
        has_same_type = new.type == state.value.type
        is_read_before = last < position[new.producer]
        if has_same_type and not is_read_later and (is_read_before or _can_update_in_place(choice, new, state.value)):
            found[new] = state
    return found


def _can_update_in_place(choice: KernelChoice, new: Value, old: Value) -> bool:
    """Whether the kernel that computes `new` may overwrite its input `old`, the state's present value.

    The kernel must read `old`, and read each element of it before it writes the element with the same index. Unless the
    kernel is pointwise, `new` must be its first output.
    """
    node = new.producer
    if node is None or not (choice.calls[node].pointwise or new is node.output):
        return False
    reads = [i for i, value in enumerate(node.inputs) if value is not None and choice.root(value) is old]
    return bool(reads) and all(choice.may_overwrite(node, index) for index in reads)
