"""Device placement: assigns nodes to devices, and partitions the graph accordingly.

Nodes are assigned one by one: by pins of the caller, by memory limits, or by cost. Then the graph is cut into parts. A
part is a graph for one device; its inputs come from other parts, the caller, or states that no part owns. Each part is
planned like any other graph. The parts run one after the other. `explain()` lists the values that are copied between
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from lathe.core.errors import UnsupportedError
from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Graph, Node, State, Value, node_needs, node_reads
from lathe.core.ir.types import Dim, TensorType
from lathe.core.kernels.call import KernelCall, Request
from lathe.core.kernels.target import GpuTarget, Target
from lathe.core.plan.kernel_choice import choose_kernel, is_view, unplannable_reason
from lathe.core.plan.min_cut import min_cut
from lathe.core.plan.plan import estimated_affine
from lathe.core.plan.transfers import COPY_BANDWIDTH

HOST = "cpu"

COPY_SECONDS = 12e-6  # to start a copy and wait for it
_LAUNCH_SECONDS = 2e-6  # of one kernel in a CUDA graph
_REFERENCE_SLOWDOWN = 30  # a node on its reference takes this many times as long as a compiled kernel


@dataclass(frozen=True, slots=True)
class DeviceSite:
    """A device to place nodes on.

    `memory` is the limit in bytes (None: no limit). `flops` and `bandwidth` are the peak rates of the device in
    operations and bytes per second.
    """

    name: str
    target: Target | GpuTarget
    memory: int | None = None
    flops: float = 1e12
    bandwidth: float = 1e11

    @property
    def is_host(self) -> bool:
        return self.name == HOST


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that is copied from device `source` to `target`, for part `receiver`; `sender` is the part that makes it.

    `sender` is None for an input of the model, or a state that no part owns: these come from the host. `nbytes` is the
    size of the value. Parts are numbered in the order in which they run.
    """

    name: str
    source: str
    target: str
    nbytes: Dim
    sender: int | None
    receiver: int


@dataclass(frozen=True)
class Part:
    """The nodes that one device runs without waiting for another, as a graph whose values keep their names."""

    device: str
    graph: Graph


@dataclass(frozen=True)
class Placement:
    """Parts in the order in which they run. `states`: the states of the graph that no part owns (`_owner`).

    `crossings` are the values that are copied between devices, and `notes` lines about the placement for `explain()`.
    """

    parts: tuple[Part, ...]
    crossings: tuple[Crossing, ...] = ()
    states: tuple[State, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacementOptions:
    """How to assign nodes. `pins` maps names of nodes to names of devices, and takes precedence.

    Other nodes are pinned by their annotation (`Node.device`). A view cannot be pinned elsewhere than to the device of
    its source, and an annotation of a view counts only if its source is there. With `by_cost`, only nodes that are
    worth the copies leave the host. Otherwise the first device gets every node for which it has a kernel, until its
    memory is full; then the next device follows. `rows` is the batch size for which memory and cost are estimated.

    Devices in `swaps` exchange values and weights with the host, so that the nodes there need not fit at the same time.
    Such a device gets every node that is pinned to it, and the last device also the nodes for which no other one has
    memory, if the operands of the node itself fit.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    by_cost: bool = False
    rows: int = 1
    swaps: Set[str] = frozenset()


def place_nodes(graph: Graph, sites: Sequence[DeviceSite], wishes: PlacementOptions = PlacementOptions()) -> Placement:
    """Assign the nodes of `graph` to devices, and partition the graph into parts, which are copies of its nodes.

    `sites` are in order of preference, and the host is the last. UnsupportedError for a pin that names no node or no
    device, for a device other than the host that lacks a kernel or memory for the pinned node, and for a view whose
    source is elsewhere.
    """
    problem = _Problem(graph, sites, wishes)
    worth = _worth_copies(problem) if wishes.by_cost else set(problem.nodes)
    assigned = _assign_by_memory(problem, worth)
    where = _with_views(problem, assigned)
    for node in graph.nodes:
        pinned = wishes.pins.get(node.name, where[node])
        if where[node] != pinned:  # a view, as other nodes are placed by their pins
            reason = f"{node.op} is a view, which stays with its source on {where[node]}, got the device {pinned}"
            raise UnsupportedError(reason, where=f"node '{node.name}'")
    return _partition(graph, where, tuple(_lack_of_memory(problem, worth, assigned)))


class _Problem:
    """The nodes to place, which are all except views, and the kernels that devices have for them."""

    def __init__(self, graph: Graph, sites: Sequence[DeviceSite], wishes: PlacementOptions) -> None:
        self.graph, self.wishes = graph, wishes
        self.sites = {site.name: site for site in sites}
        self.devices = [site for site in sites if not site.is_host]
        self.nodes = [node for node in graph.nodes if unplannable_reason(node) is not None or not is_view(node)]
        self._check_pins()

    def call(self, node: Node, site: DeviceSite) -> KernelCall | None:
        """The kernel that the catalog prefers for a node on a device; None if the device has none for it."""
        if unplannable_reason(node) is not None:
            return None
        found = choose_kernel(Request(node, self.graph.constants, site.target))
        return found if isinstance(found, KernelCall) else None

    def allowed(self, node: Node) -> list[DeviceSite]:
        """The devices besides the host that have a kernel for a node; for a pinned node at most the pinned device."""
        pinned = self.pin(node)
        return [
            site
            for site in self.devices
            if (pinned is None or site.name == pinned) and self.call(node, site) is not None
        ]

    def pin(self, node: Node) -> str | None:
        """The device that must run a node, by the caller's wish or by its annotation; None if any may."""
        return self.wishes.pins.get(node.name) or node.device or None

    def _check_pins(self) -> None:
        names = dict.fromkeys(node.name for node in self.graph.nodes)
        for name, device in self.wishes.pins.items():
            if name not in names or device not in self.sites:
                known = f"one of {', '.join(self.sites)}" if name in names else f"a node among {', '.join(names)}"
                raise UnsupportedError(f"node '{name}' is placed on '{device}', expected {known}")
        for node in self.graph.nodes:
            self._check_pin(node, self.pin(node))

    def _check_pin(self, node: Node, device: str | None) -> None:
        where = f"node '{node.name}'"
        if device is not None and device not in self.sites:
            reason = f"is annotated with the device '{device}', expected one of {', '.join(self.sites)}"
            raise UnsupportedError(reason, where=where)
        if device in (None, HOST) or is_view(node):
            return
        if self.call(node, self.sites[str(device)]) is None:
            raise UnsupportedError(f"{device} has no kernel for {node.op}", where=where)


# -- assignment ---------------------------------------------------------------------------------------------------


def _assign_by_memory(problem: _Problem, worth: Set[Node]) -> dict[Node, str]:
    """Assign every node in `worth` to the first device with a kernel and free memory, all other nodes to the host.

    A pinned node considers its device only; UnsupportedError if it does not fit there. If a node does not fit on a
    device, the device is full: later nodes, also small ones, go to the next device, so that a chain of nodes crosses
    between the two once.
    """
    where: dict[Node, str] = {}
    usage = {site.name: _MemoryEstimate(problem.graph, problem.wishes.rows) for site in problem.devices}
    full: set[str] = set()
    for node in problem.nodes:
        for site in problem.allowed(node) if node in worth else ():
            used = usage[site.name]
            swaps = _may_swap(problem, node, site)
            if site.name in full and not swaps:
                continue
            if site.memory is None or (used.alone(node) if swaps else used.with_node(node)) <= site.memory:
                used.add(node)
                where[node] = site.name
                break
            if not swaps:
                full.add(site.name)
        pinned = problem.pin(node) or HOST
        if where.setdefault(node, HOST) != pinned != HOST:
            limit = problem.sites[pinned].memory
            raise UnsupportedError(f"{pinned} has no room for it in {limit} bytes", where=f"node '{node.name}'")
    return where


def _lack_of_memory(problem: _Problem, worth: Set[Node], where: Mapping[Node, str]) -> Iterator[str]:
    """A note on the nodes that run on the host although a device has kernels for them, with the sizes of one."""
    left = [node for node in problem.nodes if node in worth and where[node] == HOST and problem.allowed(node)]
    if left:
        needed = _MemoryEstimate(problem.graph, problem.wishes.rows).alone(left[0])
        room = ", ".join(f"{site.name} has {site.memory} bytes" for site in problem.allowed(left[0]))
        yield f"{len(left)} nodes are on {HOST} for lack of memory: {room}, {left[0].name} alone needs {needed}"


def _may_swap(problem: _Problem, node: Node, site: DeviceSite) -> bool:
    """Whether the device takes a node for which it has no memory beside its other nodes."""
    is_wanted = problem.pin(node) is not None or site is problem.devices[-1]
    return is_wanted and site.name in problem.wishes.swaps


class _MemoryEstimate:
    """An estimate of the bytes that the nodes of a device need: their constants, and the peak of live values."""

    def __init__(self, graph: Graph, rows: int) -> None:
        self._constants, self._rows = graph.constants, rows
        self._last = {value: node for node in graph.nodes for value in node_reads(node)}
        self._live_outs = graph.live_outs()
        self._live: dict[Value, int] = {}
        self._weights: dict[Value, int] = {}
        self._peak = 0

    def with_node(self, node: Node) -> int:
        """The bytes that are needed with this node added; the estimate itself stays unchanged."""
        weights = self._weights | self._new_weights(node)
        live = sum((self._live | self._operands(node)).values())
        return sum(weights.values()) + max(self._peak, live)

    def alone(self, node: Node) -> int:
        """The bytes that are needed while the node runs, if all others are elsewhere."""
        return sum(self._operands(node).values()) + sum(self._new_weights(node).values())

    def add(self, node: Node) -> None:
        self._weights |= self._new_weights(node)
        self._live |= self._operands(node)
        self._peak = max(self._peak, sum(self._live.values()))
        for value in [v for v in self._live if self._last.get(v) is node and v not in self._live_outs]:
            del self._live[value]

    def _new_weights(self, node: Node) -> dict[Value, int]:
        return {value: self._constants[value].nbytes for value in node_reads(node) if value in self._constants}

    def _operands(self, node: Node) -> dict[Value, int]:
        values = [value for value in (*node_reads(node), *node.outputs) if value not in self._constants]
        return {value: _bytes_of(value, self._rows) for value in values}


def _worth_copies(problem: _Problem) -> set[Node]:
    """The nodes for the first device such that the estimated time of all nodes and copies is minimal (a minimum cut).

    All pinned nodes are included, whatever their device.
    """
    host = problem.sites[HOST]
    device = next((site for site in problem.devices), host)
    seconds: dict[Node, tuple[float, float]] = {}
    for node in problem.nodes:
        call = problem.call(node, device) if device in problem.allowed(node) else None
        on_device = _seconds(call, device, problem.wishes.rows) + _LAUNCH_SECONDS if call is not None else None
        on_host = None if problem.pin(node) == device.name else _host_seconds(problem, node, host)
        never = 1e9  # seconds: a minimum cut never pays that
        seconds[node] = (never if on_device is None else on_device, never if on_host is None else on_host)
    copies = {(a, b): COPY_SECONDS + size / COPY_BANDWIDTH for a, b, size in _edges(problem)}
    ports = {node: _port_bytes(problem, node) for node in problem.nodes}
    # A node on the device also pays for copies of the model's inputs and outputs, which are on the host.
    ends = {node: (t + (COPY_SECONDS + ports[node] / COPY_BANDWIDTH if ports[node] else 0), h)
            for node, (t, h) in seconds.items()}  # fmt: skip
    return min_cut(ends, copies) | {node for node in problem.nodes if problem.pin(node)}


def _seconds(call: KernelCall, site: DeviceSite, rows: int) -> float:
    """The seconds that a kernel takes for `rows`, by the roofline model: limited by arithmetic or memory bandwidth."""
    flops, nbytes = estimated_affine(call.flops).at(rows), estimated_affine(call.bytes).at(rows)
    return max(flops / site.flops, nbytes / site.bandwidth)


def _host_seconds(problem: _Problem, node: Node, host: DeviceSite) -> float:
    call = problem.call(node, host)
    if call is not None:
        return _seconds(call, host, problem.wishes.rows)
    moved = sum(_bytes_of(value, problem.wishes.rows) for value in (*node_reads(node), *node.outputs))
    return _REFERENCE_SLOWDOWN * moved / host.bandwidth


def _edges(problem: _Problem) -> Iterator[tuple[Node, Node, int]]:
    """Yield each producer and reader of a value, with the value's bytes; a reader of a view reads its source."""
    nodes = set(problem.nodes)
    for node in problem.nodes:
        for value in dict.fromkeys(map(_view_source, node_reads(node))):
            if value.producer in nodes and value.producer is not None:
                yield value.producer, node, _bytes_of(value, problem.wishes.rows)


def _port_bytes(problem: _Problem, node: Node) -> int:
    """The bytes of the model's inputs and outputs that a node reads or writes."""
    ports = {*problem.graph.inputs, *problem.graph.outputs}
    values = dict.fromkeys([*map(_view_source, node_reads(node)), *node.outputs])
    return sum(_bytes_of(value, problem.wishes.rows) for value in values if value in ports)


def _view_source(value: Value) -> Value:
    """The value at the start of the chain of views that computes `value`; `value` itself if it is not a view."""
    while value.producer is not None and unplannable_reason(value.producer) is None and is_view(value.producer):
        source = value.producer.inputs[0]
        if source is None:
            return value
        value = source
    return value


def _bytes_of(value: Value, rows: int) -> int:
    type_ = value.type
    known = isinstance(type_, TensorType) and type_.shape is not None and type_.symbols <= {"n"}
    return evaluate(value.tensor.nbytes, {"n": rows}) if known else 0


def _with_views(problem: _Problem, where: dict[Node, str]) -> dict[Node, str]:
    """The assignment with views added, each on the device of the node that computes its source.

    If the source is an input, state or constant, the view is on the device of its first assigned reader, or the host.
    """
    found = dict(where)
    readers = problem.graph.uses()
    for node in problem.graph.nodes:
        if node not in found:
            producer = _view_source(node.output).producer
            of_source = found.get(producer) if producer is not None else None
            of_reader = next((found[reader] for reader in readers.get(node.output, ()) if reader in found), HOST)
            found[node] = of_source or of_reader
    return found


# -- partition ----------------------------------------------------------------------------------------------------


def _partition(graph: Graph, where: Mapping[Node, str], more: tuple[str, ...]) -> Placement:
    groups = list(device_groups(graph, where))
    maker = {value: index for index, (_, nodes) in enumerate(groups) for node in nodes for value in node.outputs}
    owners = {state: _owner(state, graph, groups, maker) for state in graph.states}
    parts = tuple(
        Part(
            device, part_graph(graph, index, nodes, maker, [state for state, owner in owners.items() if owner == index])
        )
        for index, (device, nodes) in enumerate(groups)
    )
    rest = tuple(state for state, owner in owners.items() if owner is None)
    counts = {device: sum(device == other for other in where.values()) for device in dict.fromkeys(where.values())}
    notes = tuple(f"{count} nodes on {device}" for device, count in counts.items())
    return Placement(parts, tuple(_crossings(parts)), rest, (*notes, *more))


def device_groups(graph: Graph, where: Mapping[Node, str]) -> Iterator[tuple[str, list[Node]]]:
    """Yield groups of nodes, each with its device, in a topological order that changes the device only when it must.

    `where` has a device for every node of `graph`, whose nodes are in topological order.
    """
    remaining, available = list(graph.nodes), {value for value in graph.values() if value.producer is None}
    while remaining:
        device = where[next(node for node in remaining if _is_ready(node, available))]
        nodes = _take_all(remaining, {node for node in remaining if where[node] == device}, available)
        yield device, nodes


def _take_all(remaining: list[Node], here: set[Node], available: set[Value]) -> list[Node]:
    """Remove and return the nodes of `here` that can run now from `remaining`, which is in topological order.

    Their outputs are added to `available`.
    """
    ready_nodes: list[Node] = []
    left: list[Node] = []
    for node in remaining:
        if node in here and _is_ready(node, available):
            ready_nodes.append(node)
            available.update(node.outputs)
        else:
            left.append(node)
    remaining[:] = left
    return ready_nodes


def _is_ready(node: Node, available: set[Value]) -> bool:
    return all(value in available or value.producer is None for value in node_needs(node))


def _owner(
    state: State, graph: Graph, groups: Sequence[tuple[str, list[Node]]], maker: Mapping[Value, int]
) -> int | None:
    """The index of the part that owns a state: the part in which all its readers and the maker of its next value are.

    None if they are in several parts, or if there are none, or if the next value is an input or another state. A state
    that does not change, or becomes a constant, belongs to the part that has all its readers.
    """
    readers = {i for i, (_, nodes) in enumerate(groups) for node in nodes if state.value in set(node_reads(node))}
    if state.update in maker:
        readers.add(maker[state.update])
    elif state.update is not state.value and state.update not in graph.constants:
        return None
    return next(iter(readers)) if len(readers) == 1 else None


def part_graph(graph: Graph, index: int, nodes: list[Node], home: Mapping[Value, int], states: list[State]) -> Graph:
    """The graph of part `index`, a copy of `nodes` with new values of the same names.

    `home` has the index of the part that makes each value, and `states` are the states that this part owns. The outputs
    of the result are those values of `nodes` that other parts read or wait for, that are outputs of `graph`, or that
    are next values of states that the part does not own.
    """
    reads = list(dict.fromkeys(value for node in nodes for value in node_reads(node)))
    own = {state.value for state in states}
    needed = [*reads, *(state.update for state in states)]
    constants = {value: graph.constants[value] for value in needed if value in graph.constants}
    inputs = [v for v in reads if home.get(v) != index and v not in constants and v not in own]
    elsewhere = {value for node in graph.nodes if home[node.outputs[0]] != index for value in node_needs(node)}
    external_outputs = {*graph.outputs, *(state.update for state in graph.states if state not in states)}
    outputs = [v for node in nodes for v in node.outputs if v in elsewhere or v in external_outputs]
    part = Graph(f"{graph.name}.{index}", inputs, outputs, list(nodes), constants, states).clone()
    return _without_outer_edges(part)


def _without_outer_edges(graph: Graph) -> Graph:
    """A part without control edges from other parts, which run before it."""
    own = set(graph.values())
    for node in graph.nodes:
        node.after = tuple(value for value in node.after if value in own)
    return graph


def _crossings(parts: Sequence[Part]) -> Iterator[Crossing]:
    maker = {value.name: index for index, part in enumerate(parts) for value in part.graph.outputs}
    for index, part in enumerate(parts):
        for value in part.graph.inputs:
            sender = maker.get(value.name)
            source = parts[sender].device if sender is not None else HOST
            if source != part.device and isinstance(value.type, TensorType) and value.type.shape is not None:
                yield Crossing(value.name, source, part.device, value.tensor.nbytes, sender, index)
