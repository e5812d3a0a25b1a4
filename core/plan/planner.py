"""From an optimized graph to a plan: choose kernels, share memory, give every operand an address.

order -> choose a kernel per node -> values inside others -> storage per value (views, in place, straight into
outputs) -> lifetimes -> arena offsets -> addresses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from core.ir.graph import Array, Graph, Node, State, Value, captures, node_reads
from core.ir.types import DType, TensorType
from core.kernels.catalog import (
    VIEWS,
    Block,
    Flag,
    In,
    KernelCall,
    Operand,
    Out,
    Outer,
    Packed,
    Request,
    Scratch,
    Selector,
    select,
)
from core.kernels.target import GPU_ALIGNMENT, GpuTarget, Target
from core.plan.arena import place
from core.plan.control import CONTROL, NotNative, control_call, outer_values
from core.plan.liveness import ALIGNMENT, Affine, Buffer, aligned, lower_bound
from core.plan.order import order
from core.plan.plan import (
    ARENA,
    FLAG_BYTES,
    WEIGHTS,
    Address,
    Fallback,
    Memory,
    Plan,
    Planned,
    Port,
    Region,
    Segment,
    Step,
    WeightItem,
    affine_of,
    exact_affine,
    weight_chunks,
)
from core.plan.probe import has_elements, holds_for_every_batch
from core.plan.reach import ELEMENTS, PROGRAMS, most_rows
from core.plan.stages import alone, stages
from core.plan.state import updated_in_place
from core.plan.windows import Window, Windows

_STAGES_MAY_COST = 1.05  # of the memory that the arena needs anyway

__all__ = ["awkward_value", "is_view", "kernel_of", "make_plan", "plannable", "weight_chunks"]


def make_plan(
    graph: Graph, target: Target | GpuTarget, threads: int = 1, choose: Selector = select, winograd: bool = True
) -> Planned:
    """Plan a graph whose only symbol (apart from dimensions that depend on data) is the batch size `n`.

    `choose` picks the kernel of a node among what the catalog has for its request (`winograd`: see Request); None where
    the node has to run on the reference.
    """
    return _Planner(graph, target, threads, choose, winograd).plan()


def plannable(value: Value) -> bool:
    """Whether a value can live in the arena: a tensor of fixed-size elements whose shape is affine in `n`."""
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is DType.STRING:
        return False
    return all(exact_affine(dim) is not None for dim in type_.shape) and exact_affine(type_.size) is not None


def awkward_value(node: Node) -> str | None:
    """Why no kernel can run a node whatever it computes: a value of it that cannot live in the arena."""
    awkward = next((v for v in [*node_reads(node), *node.outputs] if not plannable(v)), None)
    return f"%{awkward.name} is {awkward.type}, which only exists while the model runs" if awkward is not None else None


def is_view(node: Node) -> bool:
    """Whether the output is the input's bytes, for every batch size."""
    source = node.input(0)
    if node.op not in VIEWS or len(node.outputs) != 1 or source is None or not plannable(source):
        return False
    bound = len(node.inputs) == 1  # else the shape is computed from data, and that of the output only declared
    return bound and plannable(node.output) and source.tensor.nbytes == node.output.tensor.nbytes


def kernel_of(request: Request, choose: Selector = select) -> KernelCall | str:
    """The kernel of a node whose values can live in the arena, or why it has none."""
    node = request.node
    what = f"{node.op} of {', '.join(_types(node))}"
    if not has_elements(node):
        return f"{what} has empty operands"
    call = choose(request)
    if call is None:
        return f"no compiled kernel for {what}"
    if not holds_for_every_batch(node, request.constants):
        return f"{what} only fits some batch sizes"
    return call


@dataclass(eq=False)
class _Place:
    """Where a value's bytes are: a fixed base, or a buffer of the arena."""

    base: int
    buffer: Buffer | None = None
    offset: Affine = field(default_factory=Affine)

    def at(self, start: Affine) -> _Place:
        """The place that begins `start` bytes further."""
        return _Place(self.base, self.buffer, self.offset + start)

    def address(self) -> Address:
        if self.buffer is None:
            return Address(self.base, self.offset)
        return Address(ARENA, (self.buffer.offset or Affine()) + self.offset)


class _Planner:
    def __init__(
        self, graph: Graph, target: Target | GpuTarget, threads: int, choose: Selector, winograd: bool
    ) -> None:
        self.graph = graph
        self.choose = choose
        self.winograd = winograd
        self.target = target
        self.threads = threads
        self.nodes = order(graph)
        self.calls: dict[Node, KernelCall] = {}
        self.reasons: dict[Node, str] = {}
        self.windows: dict[Value, Window] = {}
        self.places: dict[Value, _Place] = {}
        self.buffers: list[Buffer] = []
        self.items: dict[tuple[Value, str], WeightItem] = {}
        self.weight_bytes = 0
        self.scratch: dict[tuple[Node, int], Buffer] = {}
        self.flags: dict[Node, int] = {}
        self.times: Mapping[Node, int] = {}
        self.beside: Mapping[int, Sequence[Node]] = {}
        self.inputs, self.states, self.outputs = self._ports()

    def _ports(self) -> tuple[tuple[Port, ...], tuple[Port, ...], tuple[Port, ...]]:
        groups = (self.graph.inputs, [s.value for s in self.graph.states], self.graph.outputs)
        base, ports = WEIGHTS + 1, []
        for values in groups:
            ports.append(tuple(Port(v.name, v.type, base + i) for i, v in enumerate(values)))
            base += len(values)
        return ports[0], ports[1], ports[2]

    def plan(self) -> Planned:
        for node in self.nodes:
            self._choose(node)
        self._find_windows()
        self._bind_ports()
        arena = self._store()
        steps, schedule = self._tape()
        located = self._located()  # may add constants, so it comes before the weight block's size is read
        plan = Plan(
            inputs=self.inputs,
            states=self.states,
            outputs=self.outputs,
            steps=tuple(steps),
            schedule=tuple(schedule),
            arena=arena,
            weights=self.weight_bytes,
            memory=self._memory(arena),
            fallbacks=self._fallback_graph(),
            located=located,
            copies=self._copies(),
            threads=self.threads,
            regions=self._regions(),
            most_rows=self._most_rows() if isinstance(self.target, GpuTarget) else None,
        )
        specs = {spec.symbol: spec for call in self.calls.values() for spec in (call.spec, *call.parts)}
        return Planned(plan, specs, tuple(self.items.values()))

    # -- which kernel ---------------------------------------------------------------------------------------------

    def _choose(self, node: Node) -> None:
        """Set the node's kernel, or the reason why it has none. Views have neither."""
        awkward = awkward_value(node)
        if awkward is not None:
            self.reasons[node] = awkward
        elif not is_view(node):
            self._choose_kernel(node)

    def _choose_kernel(self, node: Node) -> None:
        request = self._request(node)
        if node.op in CONTROL and isinstance(self.target, Target) and has_elements(node):
            self._choose_control(request)
            return
        found = kernel_of(request, self.choose)
        if isinstance(found, str):
            self.reasons[node] = found
        else:
            self.calls[node] = found

    def _choose_control(self, request: Request) -> None:
        """Loops and branches are one kernel when all of their bodies have kernels."""
        try:
            self.calls[request.node] = control_call(request, self._body_plan)
        except NotNative as reason:
            self.reasons[request.node] = str(reason)

    def _body_plan(self, body: Graph) -> Planned:
        return make_plan(body, self.target, 1, self.choose, self.winograd)

    def _request(self, node: Node) -> Request:
        return Request(node, self.graph.constants, self.target, self.threads, winograd=self.winograd)

    def _find_windows(self) -> None:
        """Let values live inside others where all their kernels can; nodes that only made them so have no kernel."""
        alignment = GPU_ALIGNMENT if isinstance(self.target, GpuTarget) else 1
        found = Windows(self.graph, self.calls, self._request, self._is_plain_view, alignment)
        found.find(self.nodes)
        self.windows = found.windows
        self.calls.update(found.kernels())
        for node in found.gone:
            del self.calls[node]

    def _is_plain_view(self, node: Node) -> bool:
        return node not in self.reasons and is_view(node)

    # -- where values live ----------------------------------------------------------------------------------------

    def _bind_ports(self) -> None:
        for value, port in zip(self.graph.inputs, self.inputs, strict=True):
            self.places[value] = _Place(port.base)
        for state, port in zip(self.graph.states, self.states, strict=True):
            self.places[state.value] = _Place(port.base)
        roots = {value: self._root(value) for value in self.graph.outputs}
        taken: set[Value] = set()
        for value, port in zip(self.graph.outputs, self.outputs, strict=True):
            root = roots[value]
            if root.producer is not None and root not in taken and plannable(root):
                self.places[root] = _Place(port.base)
                taken.add(root)
        bases = dict(self._state_ports())
        for value, state in updated_in_place(self.graph, self.nodes, self.calls, self._root).items():
            self.places[value] = _Place(bases[state])

    def _store(self) -> Affine:
        """Places for everything, and the size of the arena: by stages, unless they need much more of it."""
        ports, each = dict(self.places), alone(self.nodes)
        if self.threads == 1:
            return self._arrange(ports, each)
        together = stages(self.nodes, self.calls.keys(), self.reasons.keys(), self._home, self.windows.keys())
        least = self._arrange(ports, each)
        arena = self._arrange(ports, together)
        return arena if arena.at(1) <= least.at(1) * _STAGES_MAY_COST else self._arrange(ports, each)

    def _arrange(self, ports: Mapping[Value, _Place], times: Mapping[Node, int]) -> Affine:
        """Places for everything that nodes write, where nodes of one time run side by side."""
        self.places, self.times, self.beside = dict(ports), times, _by_time(times)
        self.buffers.clear()
        self.scratch.clear()
        last_read = self._last_reads()
        for node in self.nodes:
            self._store_outputs(times[node], node, last_read)
            self._store_scratch(times[node], node)
        self._extend_lifetimes(last_read)
        return place(self.buffers)

    def _home(self, value: Value) -> Value | int:
        """What shares memory with the value whatever the arena looks like: a base, or the value whose bytes it has."""
        root = self._root(value)
        return self.places[root].base if root in self.places else root

    def _root(self, value: Value) -> Value:
        """The value whose bytes a chain of views looks at, or that a window is part of."""
        while True:
            if value in self.windows:
                value = self.windows[value].parent
            elif value.producer is not None and self._is_plain_view(value.producer):
                value = value.producer.inputs[0]  # type: ignore[assignment]
            else:
                return value

    def _last_reads(self) -> dict[Value, int]:
        """The time of the last read of every root value, reads through views included."""
        last: dict[Value, int] = {}
        for node in self.nodes:
            for value in node_reads(node):
                last[self._root(value)] = self.times[node]
        for value in self.graph.live_outs():
            last[self._root(value)] = len(self.nodes)
        return last

    def _store_outputs(self, position: int, node: Node, last_read: dict[Value, int]) -> None:
        if node not in self.calls and node not in self.reasons and is_view(node):
            self.places[node.output] = self._place(node.inputs[0])  # type: ignore[arg-type]
            return
        for value in node.outputs:
            if value in self.windows:
                self.places[value] = self._window(self.windows[value], position, last_read)
            if value in self.places or not plannable(value):
                continue
            buffer = self._inplace(position, node, value, last_read) or self._new_buffer(value, position)
            buffer.values.append(value)
            buffer.last = max(buffer.last, last_read.get(value, position))
            self.places[value] = _Place(ARENA, buffer)

    def _window(self, window: Window, position: int, last_read: dict[Value, int]) -> _Place:
        """The place of a window; the first one that is written begins the life of the tensor around it."""
        whole = window.parent
        if whole not in self.places:
            buffer = self._new_buffer(whole, position)
            buffer.values.append(whole)
            buffer.last = last_read.get(whole, position)
            self.places[whole] = _Place(ARENA, buffer)
        return self.places[whole].at(window.start)

    def _new_buffer(self, value: Value, position: int) -> Buffer:
        size = exact_affine(value.tensor.nbytes) or Affine()
        buffer = Buffer(aligned(size), position, position)
        self.buffers.append(buffer)
        return buffer

    def _inplace(self, position: int, node: Node, value: Value, last_read: dict[Value, int]) -> Buffer | None:
        """The buffer of an input that dies here and that the kernel may overwrite, if there is one of equal size."""
        call = self.calls.get(node)
        if call is None or value is not node.output:
            return None
        for index in call.inplace:
            source = node.input(index)
            if source in self.windows:
                continue
            buffer = self.places[self._root(source)].buffer if source is not None and source in self.places else None
            if buffer is None or source is None or source.tensor.nbytes != value.tensor.nbytes:
                continue
            dies = buffer.last <= position and all(last_read.get(v, -1) <= position for v in buffer.values)
            if dies and not self._read_beside(node, position, buffer.values):
                return buffer
        return None

    def _read_beside(self, node: Node, position: int, values: Sequence[Value]) -> bool:
        """Whether another node of the same time reads the memory of `values`."""
        beside = (other for other in self.beside[position] if other is not node)
        return any(self._root(value) in values for other in beside for value in node_reads(other))

    def _store_scratch(self, position: int, node: Node) -> None:
        call = self.calls.get(node)
        for index, operand in enumerate(call.operands if call else ()):
            if isinstance(operand, Scratch):
                size = exact_affine(operand.nbytes)
                if size is None:
                    raise ValueError(f"scratch of {node.op} '{node.name}' is {operand.nbytes} bytes, expected a*n + b")
                copies = 1 if operand.shared else self.threads
                buffer = Buffer(aligned(Affine(size.a * copies, size.b * copies)), position, position)
                self.buffers.append(buffer)
                self.scratch[node, index] = buffer

    def _extend_lifetimes(self, last_read: dict[Value, int]) -> None:
        for buffer in self.buffers:
            buffer.last = max([buffer.last, *(last_read.get(value, buffer.first) for value in buffer.values)])

    def _place(self, value: Value) -> _Place:
        """The place of a value that is read; constants are added to the weight block as they are."""
        if value not in self.places and value in self.graph.constants:
            item = self._weight(value, "", None)
            self.places[value] = _Place(WEIGHTS, offset=Affine(b=item.offset))
        return self.places[value]

    def _weight(self, value: Value, key: str, pack: Callable[[Array], Array] | None) -> WeightItem:
        if (value, key) not in self.items:
            array = self.graph.constants[value]
            self._add_item(value, key, array if pack is None else pack(array))
        return self.items[value, key]

    def _block(self, node: Node, block: Block) -> WeightItem:
        if (node.output, block.key) not in self.items:
            self._add_item(node.output, block.key, block.data)
        return self.items[node.output, block.key]

    def _add_item(self, value: Value, key: str, array: Array) -> None:
        data = np.ascontiguousarray(array)
        self.items[value, key] = WeightItem(self.weight_bytes, data)
        self.weight_bytes += -(-data.nbytes // ALIGNMENT) * ALIGNMENT

    # -- the tape -------------------------------------------------------------------------------------------------

    def _tape(self) -> tuple[list[Step], list[Segment | Fallback]]:
        steps: list[Step] = []
        schedule: list[Segment | Fallback] = []
        first = time = 0
        for node in self.nodes:
            if node in self.calls:
                if len(steps) > first and self.times[node] == time:
                    steps[-1] = replace(steps[-1], meets=False)
                steps.append(self._step(node, self.calls[node]))
                time = self.times[node]
            elif node in self.reasons:
                if len(steps) > first:
                    schedule.append(Segment(first, len(steps)))
                first = len(steps)
                index = sum(isinstance(entry, Fallback) for entry in schedule)
                schedule.append(Fallback(index, node.name, node.op, self.reasons[node]))
        if len(steps) > first:
            schedule.append(Segment(first, len(steps)))
        return steps, schedule

    def _step(self, node: Node, call: KernelCall) -> Step:
        operands = tuple(self._operand(node, index, operand) for index, operand in enumerate(call.operands))
        return Step(
            symbol=call.spec.symbol,
            operands=operands,
            label=node.name,
            op=node.op,
            summary=call.spec.summary,
            outputs=tuple(str(value.type) for value in node.outputs),
            flops=affine_of(call.flops),
            bytes=affine_of(call.bytes),
            grid=call.grid,
            flag=self.flags.get(node),
        )

    def _operand(self, node: Node, index: int, operand: Operand) -> Address:
        match operand:
            case Scratch():
                return _Place(ARENA, self.scratch[node, index]).address()
            case Out():
                return self.places[node.outputs[operand.index]].address()
            case Packed():
                item = self._weight(_present(node, operand.index), operand.key, operand.pack)
                return Address(WEIGHTS, Affine(b=item.offset))
            case In():
                return self._place(_present(node, operand.index)).address()
            case Outer():
                return self._place(outer_values(node, self.graph.constants)[operand.index]).address()
            case Block():
                return Address(WEIGHTS, Affine(b=self._block(node, operand).offset))
            case Flag():
                base = WEIGHTS + 1 + len(self.inputs) + len(self.states) + len(self.outputs)
                return Address(base, Affine(b=self.flags.setdefault(node, len(self.flags)) * FLAG_BYTES))

    # -- what runs on the reference -------------------------------------------------------------------------------

    def _fallback_graph(self) -> Graph:
        """The fallback nodes in order, with the constants they read; other values they read are its inputs."""
        nodes = [node for node in self.nodes if node in self.reasons]
        reads = dict.fromkeys(value for node in nodes for value in _all_reads(node))
        made = {value for node in nodes for value in node.outputs}
        constants = {v: self.graph.constants[v] for v in reads if v in self.graph.constants}
        inputs = [v for v in reads if v not in made and v not in constants]
        return Graph("fallbacks", inputs=inputs, outputs=[], nodes=nodes, constants=constants)

    def _located(self) -> dict[str, tuple[Address, TensorType]]:
        """Addresses of values that cross between native code and fallbacks, or are copied out at the end."""
        crossing = {v for node in self.reasons for v in [*_all_reads(node), *node.outputs]}
        crossing -= self.graph.constants.keys()
        crossing |= {v for v in self.graph.outputs if not self._is_home(v)}
        crossing |= {s.update for s, port in self._state_ports() if not self._is_at(s.update, port)}
        return {
            v.name: (self._place(v).address(), v.tensor)
            for v in crossing
            if plannable(v) and (v in self.places or v in self.graph.constants)
        }

    def _is_home(self, value: Value) -> bool:
        """Whether an output or state update is computed where it has to end up."""
        ports = {v: p.base for v, p in zip(self.graph.outputs, self.outputs, strict=True)}
        return value in ports and self._is_at(value, ports[value])

    def _is_at(self, value: Value, base: int) -> bool:
        place = self.places.get(value)
        return place is not None and place.base == base

    def _state_ports(self) -> list[tuple[State, int]]:
        """The states with their bases."""
        return [(state, port.base) for state, port in zip(self.graph.states, self.states, strict=True)]

    def _copies(self) -> tuple[tuple[str, int], ...]:
        copies = [
            (value.name, port.base)
            for value, port in zip(self.graph.outputs, self.outputs, strict=True)
            if value not in self.places or self.places[value].base != port.base
        ]
        copies += [(s.update.name, base) for s, base in self._state_ports() if not self._is_at(s.update, base)]
        return tuple(copies)

    def _regions(self) -> tuple[Region, ...]:
        return tuple(
            Region(b.offset or Affine(), b.size, b.first, b.last, tuple(value.name for value in b.values))
            for b in self.buffers
        )

    def _most_rows(self) -> int:
        """What the kernels of a GPU reach, by the elements of all tensors and the programs of all grids."""
        values = dict.fromkeys(v for node in self.nodes for v in (*node_reads(node), *node.outputs) if plannable(v))
        sizes = [(value.tensor.size, ELEMENTS) for value in values]
        for call in self.calls.values():
            sizes += zip(call.grid, PROGRAMS, strict=False)
        return most_rows(sizes)

    def _memory(self, arena: Affine) -> Memory:
        return Memory(
            peak=arena.at(1),
            lower_bound=lower_bound(self.buffers, 1),
            unshared=sum(buffer.size.at(1) for buffer in self.buffers),
            weights=self.weight_bytes,
        )


def _by_time(times: Mapping[Node, int]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node, time in times.items():
        found.setdefault(time, []).append(node)
    return found


def _present(node: Node, index: int) -> Value:
    value = node.input(index)
    if value is None:
        raise ValueError(f"the kernel of {node.op} '{node.name}' reads input {index}, which is absent")
    return value


def _all_reads(node: Node) -> list[Value]:
    return [*(v for v in node.inputs if v is not None), *(v for body in node.subgraphs for v in captures(body))]


def _types(node: Node) -> list[str]:
    return [str(value.type) for value in node.inputs if value is not None]
