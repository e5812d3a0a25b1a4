"""Which device runs each node, and the parts of a graph that follow from that.

Nodes are assigned one by one (where the caller says, by limits of memory, or by cost), then the graph is cut: a part is
a graph of its own for one device, whose inputs come from other parts and whose outputs go to them. Each is planned like
any other graph. The parts run one after the other; what crosses is sent and received, which `explain()` shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from core.errors import UnsupportedError
from core.ir.dim import evaluate
from core.ir.graph import Graph, Node, State, Value, node_reads
from core.ir.types import Dim, TensorType
from core.kernels.catalog import KernelCall, Request
from core.kernels.target import GpuTarget, Target
from core.plan.choice import awkward_value, is_view, kernel_of
from core.plan.cut import least_cut
from core.plan.plan import affine_of

HOST = "cpu"

_COPY_SECONDS = 12e-6  # to begin a copy, and to wait for it
_COPY_BANDWIDTH = 20e9  # bytes per second between host and device
_LAUNCH_SECONDS = 2e-6  # of one kernel inside a graph
_REFERENCE = 30  # times longer than a compiled kernel


@dataclass(frozen=True, slots=True)
class Site:
    """A device to place nodes on. `memory`: bytes that it may take; `flops` and `bandwidth`: what it does at most in a
    second."""

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
    """A value that a part receives from another device. `sender`: the part that makes it, None for the caller."""

    name: str
    source: str
    target: str
    nbytes: Dim
    sender: int | None
    receiver: int


@dataclass(frozen=True)
class Part:
    """Nodes that one device runs without waiting for another. Values keep their names."""

    device: str
    graph: Graph


@dataclass(frozen=True)
class Placement:
    """Parts in the order they run. `states`: those that no part has for itself, since several work on them."""

    parts: tuple[Part, ...]
    crossings: tuple[Crossing, ...] = ()
    states: tuple[State, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wishes:
    """How to assign. `pins`: devices by names of nodes, which go before all else. `by_cost`: the first device only gets
    what is worth the copies; else it gets all it has kernels for, as far as its memory goes, then the next one.
    `rows`: the batch size that memory and cost are counted for."""

    pins: Mapping[str, str] = field(default_factory=dict)
    by_cost: bool = False
    rows: int = 1


def placed(graph: Graph, sites: Sequence[Site], wishes: Wishes = Wishes()) -> Placement:
    """Assign and cut. `sites` are in the order of preference, the host last.

    UnsupportedError for a pin that names no node or device, or a device without a kernel or room for its node.
    """
    work = _Work(graph, sites, wishes)
    worth = _worth_copies(work) if wishes.by_cost else set(work.nodes)
    where = _with_views(work, _by_memory(work, worth))
    return _cut(graph, where)


class _Work:
    """What is to be placed: every node that is no view, with the kernels that devices have for it."""

    def __init__(self, graph: Graph, sites: Sequence[Site], wishes: Wishes) -> None:
        self.graph, self.wishes = graph, wishes
        self.sites = {site.name: site for site in sites}
        self.devices = [site for site in sites if not site.is_host]
        self.nodes = [node for node in graph.nodes if awkward_value(node) is not None or not is_view(node)]
        self.pins = self._checked_pins()

    def call(self, node: Node, site: Site) -> KernelCall | None:
        """The kernel of a node on a site."""
        if awkward_value(node) is not None:
            return None
        found = kernel_of(Request(node, self.graph.constants, site.target))
        return found if isinstance(found, KernelCall) else None

    def allowed(self, node: Node) -> list[Site]:
        """The devices that may run a node, the host not counted: it may run every node that is not pinned."""
        pinned = self.pins.get(node.name)
        return [
            site
            for site in self.devices
            if (pinned is None or site.name == pinned) and self.call(node, site) is not None
        ]

    def _checked_pins(self) -> Mapping[str, str]:
        names = {node.name: node for node in self.graph.nodes}
        for name, device in self.wishes.pins.items():
            if name not in names or device not in self.sites:
                known = f"a node among {', '.join(names)}" if name not in names else f"one of {', '.join(self.sites)}"
                raise UnsupportedError(f"node '{name}' is placed on '{device}', expected {known}")
            site, node = self.sites[device], names[name]
            if not site.is_host and not is_view(node) and self.call(node, site) is None:
                raise UnsupportedError(f"{device} has no kernel for {node.op}", where=f"node '{name}'")
        return self.wishes.pins


# -- assigning ----------------------------------------------------------------------------------------------------


def _by_memory(work: _Work, worth: Set[Node]) -> dict[Node, str]:
    """Every node that is `worth` it to the first device that has a kernel and room; once a device is full, what follows
    goes to the next: so a chain crosses once."""
    where: dict[Node, str] = {}
    rooms = {site.name: _Room(work.graph, work.wishes.rows) for site in work.devices}
    full: set[str] = set()
    for node in work.nodes:
        for site in work.allowed(node) if node in worth else ():
            if site.name in full:
                continue
            if site.memory is None or rooms[site.name].with_node(node) <= site.memory:
                rooms[site.name].add(node)
                where[node] = site.name
                break
            full.add(site.name)
        pinned = work.pins.get(node.name, HOST)
        if where.setdefault(node, HOST) != pinned != HOST:
            limit = work.sites[pinned].memory
            raise UnsupportedError(f"{pinned} has no room for it in {limit} bytes", where=f"node '{node.name}'")
    return where


class _Room:
    """About how many bytes the nodes of a device take: their constants, and the most that is alive between them."""

    def __init__(self, graph: Graph, rows: int) -> None:
        self._constants, self._rows = graph.constants, rows
        self._last = {value: node for node in graph.nodes for value in node_reads(node)}
        self._kept = graph.live_outs()
        self._alive: dict[Value, int] = {}
        self._weights: dict[Value, int] = {}
        self._peak = 0

    def with_node(self, node: Node) -> int:
        """The bytes if this node came, too."""
        weights = self._weights | self._new_weights(node)
        alive = sum((self._alive | self._touched(node)).values())
        return sum(weights.values()) + max(self._peak, alive)

    def add(self, node: Node) -> None:
        self._weights |= self._new_weights(node)
        self._alive |= self._touched(node)
        self._peak = max(self._peak, sum(self._alive.values()))
        for value in [v for v in self._alive if self._last.get(v) is node and v not in self._kept]:
            del self._alive[value]

    def _new_weights(self, node: Node) -> dict[Value, int]:
        return {value: self._constants[value].nbytes for value in node_reads(node) if value in self._constants}

    def _touched(self, node: Node) -> dict[Value, int]:
        values = [value for value in (*node_reads(node), *node.outputs) if value not in self._constants]
        return {value: _bytes_of(value, self._rows) for value in values}


def _worth_copies(work: _Work) -> set[Node]:
    """What the first device runs where the time of all nodes and copies is least (a least cut), and all that is
    pinned."""
    host = work.sites[HOST]
    device = next((site for site in work.devices), host)
    seconds: dict[Node, tuple[float, float]] = {}
    for node in work.nodes:
        call = work.call(node, device) if device in work.allowed(node) else None
        there = _seconds(call, device, work.wishes.rows) + _LAUNCH_SECONDS if call is not None else None
        here = None if work.pins.get(node.name) == device.name else _host_seconds(work, node, host)
        never = 1e9  # seconds: no cut goes through that
        seconds[node] = (never if there is None else there, never if here is None else here)
    copies = {(a, b): _COPY_SECONDS + size / _COPY_BANDWIDTH for a, b, size in _edges(work)}
    ports = {node: _port_bytes(work, node) for node in work.nodes}
    # What comes from the host or goes back to it is a copy for a node that is not there.
    ends = {node: (t + (_COPY_SECONDS + ports[node] / _COPY_BANDWIDTH if ports[node] else 0), h)
            for node, (t, h) in seconds.items()}  # fmt: skip
    return least_cut(ends, copies) | {node for node in work.nodes if node.name in work.pins}


def _seconds(call: KernelCall, site: Site, rows: int) -> float:
    flops, nbytes = affine_of(call.flops).at(rows), affine_of(call.bytes).at(rows)
    return max(flops / site.flops, nbytes / site.bandwidth)


def _host_seconds(work: _Work, node: Node, host: Site) -> float:
    call = work.call(node, host)
    if call is not None:
        return _seconds(call, host, work.wishes.rows)
    moved = sum(_bytes_of(value, work.wishes.rows) for value in (*node_reads(node), *node.outputs))
    return _REFERENCE * moved / host.bandwidth


def _edges(work: _Work) -> Iterator[tuple[Node, Node, int]]:
    """Who makes what others read, views left out, with the bytes."""
    placed_nodes = set(work.nodes)
    for node in work.nodes:
        for value in dict.fromkeys(map(_seen_through, node_reads(node))):
            if value.producer in placed_nodes and value.producer is not None:
                yield value.producer, node, _bytes_of(value, work.wishes.rows)


def _port_bytes(work: _Work, node: Node) -> int:
    """Bytes of the model's inputs and outputs that a node touches."""
    given = {*work.graph.inputs, *work.graph.outputs}
    values = dict.fromkeys([*map(_seen_through, node_reads(node)), *node.outputs])
    return sum(_bytes_of(value, work.wishes.rows) for value in values if value in given)


def _seen_through(value: Value) -> Value:
    """What a chain of views looks at."""
    while value.producer is not None and awkward_value(value.producer) is None and is_view(value.producer):
        source = value.producer.inputs[0]
        if source is None:
            return value
        value = source
    return value


def _bytes_of(value: Value, rows: int) -> int:
    type_ = value.type
    known = isinstance(type_, TensorType) and type_.shape is not None and type_.symbols <= {"n"}
    return evaluate(value.tensor.nbytes, {"n": rows}) if known else 0


def _with_views(work: _Work, where: dict[Node, str]) -> dict[Node, str]:
    """Views are where what they look at is; those of the model's inputs, where they are read."""
    found = dict(where)
    readers = work.graph.uses()
    for node in work.graph.nodes:
        if node not in found:
            producer = _seen_through(node.output).producer
            near = found.get(producer) if producer is not None else None
            first = next((found[reader] for reader in readers.get(node.output, ()) if reader in found), HOST)
            found[node] = near or first
    return found


# -- cutting ------------------------------------------------------------------------------------------------------


def _cut(graph: Graph, where: Mapping[Node, str]) -> Placement:
    groups = list(groups_of(graph, where))
    home = {value: index for index, (_, nodes) in enumerate(groups) for node in nodes for value in node.outputs}
    owners = {state: _owner(state, graph, groups, home) for state in graph.states}
    parts = tuple(
        Part(device, graph_of(graph, index, nodes, home, [state for state, owner in owners.items() if owner == index]))
        for index, (device, nodes) in enumerate(groups)
    )
    rest = tuple(state for state, owner in owners.items() if owner is None)
    counts = {device: sum(device == other for other in where.values()) for device in dict.fromkeys(where.values())}
    notes = tuple(f"{count} nodes on {device}" for device, count in counts.items())
    return Placement(parts, tuple(_crossings(parts)), rest, notes)


def groups_of(graph: Graph, where: Mapping[Node, str]) -> Iterator[tuple[str, list[Node]]]:
    """Nodes in an order that changes the device only where nothing else is ready."""
    waiting, made = list(graph.nodes), {value for value in graph.values() if value.producer is None}
    while waiting:
        device = where[next(node for node in waiting if _is_ready(node, made))]
        nodes = _take_all(waiting, {node for node in waiting if where[node] == device}, made)
        yield device, nodes


def _take_all(waiting: list[Node], here: set[Node], made: set[Value]) -> list[Node]:
    """Remove from `waiting`, which is in a topological order, what of `here` can run now."""
    taken: list[Node] = []
    left: list[Node] = []
    for node in waiting:
        if node in here and _is_ready(node, made):
            taken.append(node)
            made.update(node.outputs)
        else:
            left.append(node)
    waiting[:] = left
    return taken


def _is_ready(node: Node, made: set[Value]) -> bool:
    return all(value in made or value.producer is None for value in node_reads(node))


def _owner(
    state: State, graph: Graph, groups: Sequence[tuple[str, list[Node]]], home: Mapping[Value, int]
) -> int | None:
    """The part that alone reads and updates a state. One that stays as it is, or becomes a constant, needs no more than
    a reader."""
    readers = {i for i, (_, nodes) in enumerate(groups) for node in nodes if state.value in set(node_reads(node))}
    if state.update in home:
        readers.add(home[state.update])
    elif state.update is not state.value and state.update not in graph.constants:
        return None
    return next(iter(readers)) if len(readers) == 1 else None


def graph_of(graph: Graph, index: int, nodes: list[Node], home: Mapping[Value, int], states: list[State]) -> Graph:
    """The graph of part `index`, with values of its own. `home`: the part that makes each value."""
    reads = list(dict.fromkeys(value for node in nodes for value in node_reads(node)))
    own = {state.value for state in states}
    needed = [*reads, *(state.update for state in states)]
    constants = {value: graph.constants[value] for value in needed if value in graph.constants}
    inputs = [v for v in reads if home.get(v) != index and v not in constants and v not in own]
    elsewhere = {value for node in graph.nodes if home[node.outputs[0]] != index for value in node_reads(node)}
    kept = {*graph.outputs, *(state.update for state in graph.states if state not in states)}
    outputs = [v for node in nodes for v in node.outputs if v in elsewhere or v in kept]
    return Graph(f"{graph.name}.{index}", inputs, outputs, list(nodes), constants, states).clone()


def _crossings(parts: Sequence[Part]) -> Iterator[Crossing]:
    maker = {value.name: index for index, part in enumerate(parts) for value in part.graph.outputs}
    for index, part in enumerate(parts):
        for value in part.graph.inputs:
            sender = maker.get(value.name)
            source = parts[sender].device if sender is not None else HOST
            if source != part.device and isinstance(value.type, TensorType) and value.type.shape is not None:
                yield Crossing(value.name, source, part.device, value.tensor.nbytes, sender, index)
