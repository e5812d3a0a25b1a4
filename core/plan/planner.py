"""The planner: from an optimized graph to a plan. It chooses kernels, shares memory and assigns addresses.

order of nodes -> a kernel per node, and values that are windows of others -> storage -> tape
"""

from __future__ import annotations

from dataclasses import replace

from lathe.core.check.switch import is_checking
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Graph, Node, Value, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.kernels.call import Selector
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import GpuTarget, Target
from lathe.core.ops.opdef.registry import describe
from lathe.core.plan.cut_points import find_cut_points
from lathe.core.plan.kernel_choice import ChoiceOptions, KernelChoice, choose_kernels, is_plannable
from lathe.core.plan.liveness import Affine, lower_bound
from lathe.core.plan.movables import MemoryLimit, SwapProblem
from lathe.core.plan.order import node_order
from lathe.core.plan.plan import NO_BATCH, Address, CutPoint, Memory, Plan, PlannedGraph, Region, WeightItem
from lathe.core.plan.ports import Ports, make_ports
from lathe.core.plan.row_limit import MAX_ELEMENTS, MAX_GRID, max_rows
from lathe.core.plan.storage import Storage
from lathe.core.plan.swapping import Swapping, swap_within
from lathe.core.plan.tape import Tape


def make_plan(
    graph: Graph,
    target: Target | GpuTarget,
    threads: int = 1,
    choose: Selector = select,
    winograd: bool = True,
    supposed: tuple[Dim, ...] = (),
    limit: MemoryLimit | None = None,
) -> PlannedGraph:
    """Plan a graph whose symbols are `n` (the batch size) or sizes (`lathe.core.ir.dims`), and data-dependent ones.

    At most `threads` threads may take part in a run of the plan. `choose` returns the kernel for a request, or None if
    the node has to run on its reference. `winograd`: kernels may use Winograd's and Strassen's algorithms, which need
    fewer multiplications. `supposed` are assumptions: the types of the graph are right as long as none of these
    dimensions is negative. `limit`: of the memory of a GPU; values and weights that exceed it wait on the host until
    their next use. MemoryTooSmall if even the operands of one step exceed it. PlanError if plans are checked
    (`lathe.core.check`) and this one is wrong.
    """
    planned = _plan(graph, target, threads, choose, winograd, limit)
    planned = replace(planned, plan=replace(planned.plan, supposed=supposed))
    if is_checking():
        from lathe.core.check.dynamic_shapes import check_dynamic_shape_plan, is_dynamic_shape_graph
        from lathe.core.check.plans import check_plan

        check = check_dynamic_shape_plan if is_dynamic_shape_graph(graph) else check_plan
        check(graph, planned, target, winograd)
    return planned


def placeholder_plan(graph: Graph, target: Target | GpuTarget, misfit: Node) -> Plan:
    """A placeholder for the plan of a graph with a node, `misfit`, that is valid for some batch sizes only.

    It has the inputs of `graph` but no steps, states and outputs, and serves no batch size, so every batch size is
    compiled separately. Code for one batch size may have a kernel for `misfit`.
    """
    nothing = make_plan(Graph(graph.name, inputs=list(graph.inputs)), target).plan
    note = f"each batch size is compiled separately: {describe(misfit)} is valid for some batch sizes only"
    return replace(nothing, log=(note,), supposed=(NO_BATCH,))


def _plan(
    graph: Graph,
    target: Target | GpuTarget,
    threads: int,
    choose: Selector,
    winograd: bool,
    limit: MemoryLimit | None = None,
) -> PlannedGraph:
    def plan_body(body: Graph) -> PlannedGraph:
        return _plan(body, target, 1, choose, winograd)

    choice = choose_kernels(graph, node_order(graph), ChoiceOptions(target, threads, choose, winograd, plan_body))
    ports = make_ports(graph)
    storage = Storage(graph, choice, ports, threads)
    tape = Tape(graph, choice, storage, ports.flags_base)
    addresses = _value_addresses(graph, choice, storage, ports)  # first, as it may add constants
    plan = Plan(
        inputs=ports.inputs,
        states=ports.states,
        outputs=ports.outputs,
        steps=tuple(tape.steps),
        schedule=tuple(tape.schedule),
        arena=storage.arena,
        weights=storage.weights.nbytes,
        memory=_memory(storage),
        fallbacks=_fallback_graph(graph, choice),
        value_addresses=addresses,
        copies=tuple((value.name, base) for value, base in _final_copies(storage, ports)),
        threads=threads,
        regions=_regions(storage),
        max_rows=_most_rows(choice) if isinstance(target, GpuTarget) else None,
        cut_points=() if isinstance(target, GpuTarget) else _cut_points(choice, storage),
    )
    items = storage.weights.items
    if limit is not None and (found := swap_within(storage, tape.steps, plan, limit)) is not None:
        plan, items = _with_swapping(graph, plan, storage, ports, *found)
    specs = {spec.symbol: spec for call in choice.calls.values() for spec in call.specs}
    place = {node: index for index, node in enumerate(graph.nodes)}
    calls = tuple((place[node], choice.calls[node]) for node in choice.nodes if node in choice.calls)
    bodies = {place[node]: planned for node, planned in choice.bodies.items()}
    return PlannedGraph(plan, specs, items, calls, bodies)


def _with_swapping(
    graph: Graph, plan: Plan, storage: Storage, ports: Ports, swapping: Swapping, problem: SwapProblem
) -> tuple[Plan, tuple[WeightItem, ...]]:
    """The plan with the addresses of values that move, and its transfers; and the weight block in a new order."""
    storage.swapping, storage.buffers, storage.arena = swapping, swapping.buffers, swapping.arena
    changed = replace(
        plan,
        steps=tuple(Tape(graph, storage.choice, storage, ports.flags_base).steps),
        arena=storage.arena,
        memory=_memory(storage),
        value_addresses=_value_addresses(graph, storage.choice, storage, ports),
        regions=_regions(storage),
        transfers=swapping.transfers(problem, plan.swap_base),
        swap=swapping.swap,
        least_rows=problem.limit.rows,
        streamed=plan.weights - swapping.resident,
    )
    return changed, swapping.items


def _fallback_graph(graph: Graph, choice: KernelChoice) -> Graph:
    """A graph of the fallback nodes themselves, in order, and the constants that they read; it has no outputs.

    The values that fallback nodes read, but do not compute, are inputs.
    """
    nodes = [node for node in choice.nodes if node in choice.reasons]
    reads = dict.fromkeys(value for node in nodes for value in node_reads(node))
    produced = {value for node in nodes for value in node.outputs}
    constants = {v: graph.constants[v] for v in reads if v in graph.constants}
    inputs = [v for v in reads if v not in produced and v not in constants]
    return Graph("fallbacks", inputs=inputs, outputs=[], nodes=nodes, constants=constants)


def _value_addresses(
    graph: Graph, choice: KernelChoice, storage: Storage, ports: Ports
) -> dict[str, tuple[Address, TensorType]]:
    """The address and type, by name, of each value that fallbacks read or write, or that is copied at the end of a run.

    Left out are constants that only fallbacks read, and values without memory in the plan (strings, unknown sizes).
    """
    operands = (v for node in choice.reasons for v in (*node_reads(node), *node.outputs) if v not in graph.constants)
    crossing = dict.fromkeys([*operands, *(value for value, _ in _final_copies(storage, ports))])
    return {
        v.name: (storage.address(storage.place(v)), v.tensor)
        for v in crossing
        if is_plannable(v) and (v in storage.places or v in graph.constants)
    }


def _final_copies(storage: Storage, ports: Ports) -> list[tuple[Value, int]]:
    """The outputs and state updates that must be copied at the end of a run, with the bases to copy them to."""
    ends = [*ports.of_outputs, *((state.update, base) for state, base in ports.of_states)]
    return [(value, base) for value, base in ends if not storage.is_at(value, base)]


def _memory(storage: Storage) -> Memory:
    return Memory(
        peak=storage.arena.at(1),
        lower_bound=lower_bound(storage.buffers, 1),
        unshared=sum(buffer.size.at(1) for buffer in storage.buffers),
        weights=storage.weights.nbytes,
    )


def _regions(storage: Storage) -> tuple[Region, ...]:
    return tuple(
        Region(b.offset or Affine(), b.size, b.first, b.last, tuple(value.name for value in b.values))
        for b in storage.buffers
    )


def _cut_points(choice: KernelChoice, storage: Storage) -> tuple[CutPoint, ...]:
    """The cut points of the tape; none if fallbacks or states carry values in other memory than the arena."""
    if choice.reasons or storage.graph.states:
        return ()
    return find_cut_points(storage.buffers, [storage.times[node] for node in choice.nodes if node in choice.calls])


def _most_rows(choice: KernelChoice) -> int:
    """The largest batch that GPU kernels can index, given the elements of all tensors and the sizes of all grids."""
    values = dict.fromkeys(v for node in choice.nodes for v in (*node_reads(node), *node.outputs) if is_plannable(v))
    sizes = [(value.tensor.size, MAX_ELEMENTS) for value in values]
    for call in choice.calls.values():
        for _, kernel in call.kernels:
            sizes += zip(kernel.grid, MAX_GRID, strict=False)
    return max_rows(sizes)
