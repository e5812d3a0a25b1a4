"""From an optimized graph to a plan: choose kernels, share memory, give every operand an address.

order -> choose a kernel per node, and values inside others -> storage -> tape
"""

from __future__ import annotations

from dataclasses import replace

from core.check.switch import is_on
from core.ir.dim import Dim
from core.ir.graph import Graph, Node, Value, node_reads
from core.ir.types import TensorType
from core.kernels.catalog import Selector, select
from core.kernels.target import GpuTarget, Target
from core.ops.registry import describe
from core.plan.choice import Asked, Choice, choose_kernels, plannable
from core.plan.liveness import Affine, lower_bound
from core.plan.order import order
from core.plan.plan import NO_BATCH, Address, Memory, Plan, Planned, Region, Seam
from core.plan.ports import Ports, ports_of
from core.plan.reach import ELEMENTS, PROGRAMS, most_rows
from core.plan.seams import find_seams
from core.plan.storage import Storage
from core.plan.tape import Tape


def make_plan(
    graph: Graph,
    target: Target | GpuTarget,
    threads: int = 1,
    choose: Selector = select,
    winograd: bool = True,
    supposed: tuple[Dim, ...] = (),
) -> Planned:
    """Plan a graph whose only symbol (apart from dimensions that depend on data) is the batch size `n`.

    `choose` picks the kernel of a node among what the catalog has for its request (`winograd`: see Request); None where
    the node has to run on the reference. `supposed`: the types of the graph are right as long as none of these
    dimensions is negative. PlanError where the plan is checked, and is wrong: see `core.check`.
    """
    planned = _plan(graph, target, threads, choose, winograd)
    planned = replace(planned, plan=replace(planned.plan, supposed=supposed))
    if is_on():
        from core.check.plans import check_plan
        from core.check.sized import check_sized, is_sized_graph

        check = check_sized if is_sized_graph(graph) else check_plan
        check(graph, planned, target, winograd)
    return planned


def plan_for_no_batch(graph: Graph, target: Target | GpuTarget, misfit: Node) -> Plan:
    """What is in the place of a plan for all batch sizes where a node only fits some: it does nothing, and sends every
    run to code for just its size, where that node can have a kernel."""
    nothing = make_plan(Graph(graph.name, inputs=list(graph.inputs)), target).plan
    note = f"every batch size has code of its own: {describe(misfit)} only fits some"
    return replace(nothing, log=(note,), supposed=(NO_BATCH,))


def _plan(graph: Graph, target: Target | GpuTarget, threads: int, choose: Selector, winograd: bool) -> Planned:
    def plan_body(body: Graph) -> Planned:
        return _plan(body, target, 1, choose, winograd)

    choice = choose_kernels(graph, order(graph), Asked(target, threads, choose, winograd, plan_body))
    ports = ports_of(graph)
    storage = Storage(graph, choice, ports, threads)
    tape = Tape(graph, choice, storage, ports.flags_base)
    located = _located(graph, choice, storage, ports)  # may add constants: before the weight block's size is read
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
        located=located,
        copies=tuple((value.name, base) for value, base in _away(storage, ports)),
        threads=threads,
        regions=_regions(storage),
        most_rows=_most_rows(choice) if isinstance(target, GpuTarget) else None,
        seams=() if isinstance(target, GpuTarget) else _seams(choice, storage),
    )
    specs = {spec.symbol: spec for call in choice.calls.values() for spec in (call.code, *call.parts)}
    place = {node: index for index, node in enumerate(graph.nodes)}
    calls = tuple((place[node], choice.calls[node]) for node in choice.nodes if node in choice.calls)
    bodies = {place[node]: planned for node, planned in choice.bodies.items()}
    return Planned(plan, specs, storage.weights.items, calls, bodies)


def _fallback_graph(graph: Graph, choice: Choice) -> Graph:
    """The fallback nodes in order, with the constants they read; other values they read are its inputs."""
    nodes = [node for node in choice.nodes if node in choice.reasons]
    reads = dict.fromkeys(value for node in nodes for value in node_reads(node))
    made = {value for node in nodes for value in node.outputs}
    constants = {v: graph.constants[v] for v in reads if v in graph.constants}
    inputs = [v for v in reads if v not in made and v not in constants]
    return Graph("fallbacks", inputs=inputs, outputs=[], nodes=nodes, constants=constants)


def _located(graph: Graph, choice: Choice, storage: Storage, ports: Ports) -> dict[str, tuple[Address, TensorType]]:
    """Addresses of values that cross between native code and fallbacks, or are copied out at the end."""
    touched = (v for node in choice.reasons for v in (*node_reads(node), *node.outputs) if v not in graph.constants)
    crossing = dict.fromkeys([*touched, *(value for value, _ in _away(storage, ports))])
    return {
        v.name: (storage.place(v).address(), v.tensor)
        for v in crossing
        if plannable(v) and (v in storage.places or v in graph.constants)
    }


def _away(storage: Storage, ports: Ports) -> list[tuple[Value, int]]:
    """The outputs and updates of states that are computed elsewhere than where they end up, and the bases of that."""
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


def _seams(choice: Choice, storage: Storage) -> tuple[Seam, ...]:
    """Where a batch may be parted: nowhere if other memory than the arena carries something across."""
    if choice.reasons or storage.graph.states:
        return ()
    return find_seams(storage.buffers, [storage.times[node] for node in choice.nodes if node in choice.calls])


def _most_rows(choice: Choice) -> int:
    """What the kernels of a GPU reach, by the elements of all tensors and the programs of all grids."""
    values = dict.fromkeys(v for node in choice.nodes for v in (*node_reads(node), *node.outputs) if plannable(v))
    sizes = [(value.tensor.size, ELEMENTS) for value in values]
    for call in choice.calls.values():
        sizes += zip(call.grid, PROGRAMS, strict=False)
    return most_rows(sizes)
