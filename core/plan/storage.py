"""Memory assignment: every value lives in a port, in the weights, or in a buffer of the arena.

location of each value (views, in place, directly in outputs and states) -> lifetimes -> arena offsets
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lathe.core.ir.graph import Graph, Node, Value, node_reads
from lathe.core.kernels.call import Scratch
from lathe.core.plan.arena import place
from lathe.core.plan.kernel_choice import KernelChoice, is_plannable
from lathe.core.plan.liveness import Affine, Buffer, align_size
from lathe.core.plan.plan import ARENA, WEIGHTS, Address, exact_affine
from lathe.core.plan.ports import Ports
from lathe.core.plan.stages import concurrent_stages, separate_stages
from lathe.core.plan.state_updates import states_updated_in_place
from lathe.core.plan.weights import WeightBlock
from lathe.core.plan.windows import Window

_MAX_STAGE_COST = 1.05  # the arena with stages may be larger than the arena without them by this factor


@dataclass(eq=False)
class Place:
    """Where a value's bytes are: at `offset` from the start of `buffer`, or if that is None of base number `base`."""

    base: int
    buffer: Buffer | None = None
    offset: Affine = field(default_factory=Affine)

    def at(self, start: Affine) -> Place:
        """The place that begins `start` bytes after this one."""
        return Place(self.base, self.buffer, self.offset + start)

    def address(self) -> Address:
        if self.buffer is None:
            return Address(self.base, self.offset)
        return Address(ARENA, (self.buffer.offset or Affine()) + self.offset)


class Relocation(Protocol):
    """Where the bytes of a place are at some time: see `lathe.core.plan.swapping`."""

    def address(self, given: Place, time: int) -> Address: ...


class Storage:
    """The places of all values, and the size of the arena that they need. `times` is the stage of every node."""

    def __init__(self, graph: Graph, choice: KernelChoice, ports: Ports, threads: int) -> None:
        self.graph, self.choice, self.threads = graph, choice, threads
        self.weights = WeightBlock(graph.constants)
        self.buffers: list[Buffer] = []
        self.scratch: dict[tuple[Node, int], Buffer] = {}
        self.times: Mapping[Node, int] = {}
        self._nodes_at: Mapping[int, Sequence[Node]] = {}
        self._fixed = _port_places(graph, choice, ports)
        self.places: dict[Value, Place] = dict(self._fixed)
        self.arena = self._store()
        self.swapping: Relocation | None = None  # if values move, their places by time

    def place(self, value: Value) -> Place:
        """The place of a value that a kernel or fallback reads; a constant joins the weight block at its first use.

        KeyError for a value without memory in the plan, such as a tensor of strings that is not an input.
        """
        if value not in self.places and value in self.graph.constants:
            self.places[value] = Place(WEIGHTS, offset=Affine(b=self.weights.constant(value).offset))
        return self.places[value]

    def address(self, given: Place, node: Node | None = None) -> Address:
        """The address of a place when `node` runs, or at the end of a run."""
        if self.swapping is None:
            return given.address()
        return self.swapping.address(given, len(self.choice.nodes) if node is None else self.times[node])

    def is_at(self, value: Value, base: int) -> bool:
        """Whether a value's place is in the memory of base number `base`, so that it need not be copied there."""
        found = self.places.get(value)
        return found is not None and found.base == base

    def _store(self) -> Affine:
        """Place all values and return the size of the arena.

        With several threads, nodes share stages unless that makes the arena more than 5 % larger.
        """
        choice, separate = self.choice, separate_stages(self.choice.nodes)
        if self.threads == 1:
            return self._arrange(separate)
        shared = concurrent_stages(
            choice.nodes, choice.calls.keys(), choice.reasons.keys(), self._owner, choice.windows.keys()
        )
        least = self._arrange(separate)
        arena = self._arrange(shared)
        return arena if arena.at(1) <= least.at(1) * _MAX_STAGE_COST else self._arrange(separate)

    def _owner(self, value: Value) -> Value | int:
        """An identifier of a value's memory, before the arena is planned: a base number, or the value that owns it."""
        root = self.choice.root(value)
        return self._fixed[root].base if root in self._fixed else root

    def _arrange(self, times: Mapping[Node, int]) -> Affine:
        """Place all values that nodes write, and return the size of the arena; replaces an earlier arrangement.

        `times` has the stage of each node; nodes of the same time may run concurrently.
        """
        self.places, self.times, self._nodes_at = dict(self._fixed), times, _group_by_time(times)
        self.buffers.clear()
        self.scratch.clear()
        last_read = self._last_reads()
        for node in self.choice.nodes:
            self._store_outputs(times[node], node, last_read)
            self._store_scratch(times[node], node)
        self._extend_lifetimes(last_read)
        return place(self.buffers)

    def _last_reads(self) -> dict[Value, int]:
        """For each value that owns memory the time of its last read, also through views and windows.

        Outputs and updates of states are read after all nodes.
        """
        last: dict[Value, int] = {}
        for node in self.choice.nodes:
            for value in node_reads(node):
                last[self.choice.root(value)] = self.times[node]
        for value in self.graph.live_outs():
            last[self.choice.root(value)] = len(self.choice.nodes)
        return last

    def _store_outputs(self, time: int, node: Node, last_read: Mapping[Value, int]) -> None:
        if self.choice.is_view(node):
            self.places[node.output] = self.place(node.inputs[0])  # type: ignore[arg-type]
            return
        for value in node.outputs:
            if value in self.choice.windows:
                self.places[value] = self._in_window(self.choice.windows[value], time, last_read)
            if value in self.places or not is_plannable(value):
                continue
            buffer = self._inplace(time, node, value, last_read) or self._new_buffer(value, time)
            buffer.values.append(value)
            buffer.last = max(buffer.last, last_read.get(value, time))
            self.places[value] = Place(ARENA, buffer)

    def _in_window(self, window: Window, time: int, last_read: Mapping[Value, int]) -> Place:
        """The place of a window inside its parent, which gets a buffer now (`time`) if it has no place yet.

        The lifetime of the parent thus begins with the first window that is written.
        """
        parent = window.parent
        if parent not in self.places:
            buffer = self._new_buffer(parent, time)
            buffer.values.append(parent)
            buffer.last = last_read.get(parent, time)
            self.places[parent] = Place(ARENA, buffer)
        return self.places[parent].at(window.start)

    def _new_buffer(self, value: Value, time: int) -> Buffer:
        size = exact_affine(value.tensor.nbytes) or Affine()
        buffer = Buffer(align_size(size), time, time)
        self.buffers.append(buffer)
        return buffer

    def _inplace(self, time: int, node: Node, value: Value, last_read: Mapping[Value, int]) -> Buffer | None:
        """The buffer of an input that the kernel may overwrite with its result `value`; None if there is none.

        The input has the same size. No later node, and no other node of the same time, reads its memory. None also if
        `value` is not the node's first output.
        """
        call = self.choice.calls.get(node)
        if call is None or value is not node.output:
            return None
        for index in call.inplace:
            source = node.input(index)
            if source is None or source not in self.places or not self.choice.may_overwrite(node, index):
                continue
            buffer = self.places[self.choice.root(source)].buffer
            if buffer is None or source.tensor.nbytes != value.tensor.nbytes:
                continue
            dies = buffer.last <= time and all(last_read.get(v, -1) <= time for v in buffer.values)
            if dies and not self._is_read_concurrently(node, time, buffer.values):
                return buffer
        return None

    def _is_read_concurrently(self, node: Node, time: int, values: Sequence[Value]) -> bool:
        """Whether a node other than `node`, of the same time, reads the memory that `values` own."""
        others = (other for other in self._nodes_at[time] if other is not node)
        return any(self.choice.root(value) in values for other in others for value in node_reads(other))

    def _store_scratch(self, time: int, node: Node) -> None:
        call = self.choice.calls.get(node)
        for index, operand in enumerate(call.operands if call else ()):
            if isinstance(operand, Scratch):
                size = exact_affine(operand.nbytes)
                if size is None:
                    raise ValueError(f"scratch of {node.op} '{node.name}' is {operand.nbytes} bytes, expected a*n + b")
                copies = 1 if operand.shared else self.threads
                buffer = Buffer(align_size(size.times(copies)), time, time)
                self.buffers.append(buffer)
                self.scratch[node, index] = buffer

    def _extend_lifetimes(self, last_read: Mapping[Value, int]) -> None:
        for buffer in self.buffers:
            buffer.last = max([buffer.last, *(last_read.get(value, buffer.first) for value in buffer.values)])


def _port_places(graph: Graph, choice: KernelChoice, ports: Ports) -> dict[Value, Place]:
    """The places of values outside the arena: inputs, states, and values computed directly in outputs and states."""
    places = {value: Place(base) for value, base in ports.of_inputs}
    places |= {state.value: Place(base) for state, base in ports.of_states}
    assigned: set[Value] = set()
    for value, base in ports.of_outputs:
        root = choice.root(value)
        if root.producer is not None and root not in assigned and is_plannable(root):
            places[root] = Place(base)
            assigned.add(root)
    bases = dict(ports.of_states)
    for value, state in states_updated_in_place(graph, choice).items():
        places[value] = Place(bases[state])
    return places


def _group_by_time(times: Mapping[Node, int]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node, time in times.items():
        found.setdefault(time, []).append(node)
    return found
