"""Where every value of a plan lives: in a port, in the weights, or in a buffer of the arena that others use before it
and after it.

storage per value (views, in place, straight into outputs and states) -> lifetimes -> arena offsets
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.ir.graph import Graph, Node, Value, node_reads
from core.kernels.catalog import Scratch
from core.plan.arena import place
from core.plan.choice import Choice, plannable
from core.plan.liveness import Affine, Buffer, aligned
from core.plan.plan import ARENA, WEIGHTS, Address, exact_affine
from core.plan.ports import Ports
from core.plan.stages import alone, stages
from core.plan.state import updated_in_place
from core.plan.weights import WeightBlock
from core.plan.windows import Window

_STAGES_MAY_COST = 1.05  # of the memory that the arena needs anyway


@dataclass(eq=False)
class Place:
    """Where a value's bytes are: a fixed base, or a buffer of the arena."""

    base: int
    buffer: Buffer | None = None
    offset: Affine = field(default_factory=Affine)

    def at(self, start: Affine) -> Place:
        """The place that begins `start` bytes further."""
        return Place(self.base, self.buffer, self.offset + start)

    def address(self) -> Address:
        if self.buffer is None:
            return Address(self.base, self.offset)
        return Address(ARENA, (self.buffer.offset or Affine()) + self.offset)


class Storage:
    """Places for all values, and the arena that they need. `times` is the stage of every node."""

    def __init__(self, graph: Graph, choice: Choice, ports: Ports, threads: int) -> None:
        self.graph, self.choice, self.threads = graph, choice, threads
        self.weights = WeightBlock(graph.constants)
        self.buffers: list[Buffer] = []
        self.scratch: dict[tuple[Node, int], Buffer] = {}
        self.times: Mapping[Node, int] = {}
        self._beside: Mapping[int, Sequence[Node]] = {}
        self._fixed = _in_ports(graph, choice, ports)
        self.places: dict[Value, Place] = dict(self._fixed)
        self.arena = self._store()

    def place(self, value: Value) -> Place:
        """The place of a value that is read; constants are added to the weight block as they are."""
        if value not in self.places and value in self.graph.constants:
            self.places[value] = Place(WEIGHTS, offset=Affine(b=self.weights.constant(value).offset))
        return self.places[value]

    def is_at(self, value: Value, base: int) -> bool:
        """Whether a value is computed where it has to end up."""
        found = self.places.get(value)
        return found is not None and found.base == base

    def _store(self) -> Affine:
        """Places for everything, and the size of the arena: by stages, unless they need much more of it."""
        choice, each = self.choice, alone(self.choice.nodes)
        if self.threads == 1:
            return self._arrange(each)
        together = stages(choice.nodes, choice.calls.keys(), choice.reasons.keys(), self._home, choice.windows.keys())
        least = self._arrange(each)
        arena = self._arrange(together)
        return arena if arena.at(1) <= least.at(1) * _STAGES_MAY_COST else self._arrange(each)

    def _home(self, value: Value) -> Value | int:
        """What shares memory with the value whatever the arena looks like: a base, or the value whose bytes it has."""
        root = self.choice.root(value)
        return self._fixed[root].base if root in self._fixed else root

    def _arrange(self, times: Mapping[Node, int]) -> Affine:
        """Places for everything that nodes write, where nodes of one time run side by side."""
        self.places, self.times, self._beside = dict(self._fixed), times, _by_time(times)
        self.buffers.clear()
        self.scratch.clear()
        last_read = self._last_reads()
        for node in self.choice.nodes:
            self._store_outputs(times[node], node, last_read)
            self._store_scratch(times[node], node)
        self._extend_lifetimes(last_read)
        return place(self.buffers)

    def _last_reads(self) -> dict[Value, int]:
        """The time of the last read of every root value, reads through views included."""
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
            if value in self.places or not plannable(value):
                continue
            buffer = self._inplace(time, node, value, last_read) or self._new_buffer(value, time)
            buffer.values.append(value)
            buffer.last = max(buffer.last, last_read.get(value, time))
            self.places[value] = Place(ARENA, buffer)

    def _in_window(self, window: Window, time: int, last_read: Mapping[Value, int]) -> Place:
        """The place of a window; the first one that is written begins the life of the tensor around it."""
        whole = window.parent
        if whole not in self.places:
            buffer = self._new_buffer(whole, time)
            buffer.values.append(whole)
            buffer.last = last_read.get(whole, time)
            self.places[whole] = Place(ARENA, buffer)
        return self.places[whole].at(window.start)

    def _new_buffer(self, value: Value, time: int) -> Buffer:
        size = exact_affine(value.tensor.nbytes) or Affine()
        buffer = Buffer(aligned(size), time, time)
        self.buffers.append(buffer)
        return buffer

    def _inplace(self, time: int, node: Node, value: Value, last_read: Mapping[Value, int]) -> Buffer | None:
        """The buffer of an input that dies here and that the kernel may overwrite, if there is one of equal size."""
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
            if dies and not self._read_beside(node, time, buffer.values):
                return buffer
        return None

    def _read_beside(self, node: Node, time: int, values: Sequence[Value]) -> bool:
        """Whether another node of the same time reads the memory of `values`."""
        beside = (other for other in self._beside[time] if other is not node)
        return any(self.choice.root(value) in values for other in beside for value in node_reads(other))

    def _store_scratch(self, time: int, node: Node) -> None:
        call = self.choice.calls.get(node)
        for index, operand in enumerate(call.operands if call else ()):
            if isinstance(operand, Scratch):
                size = exact_affine(operand.nbytes)
                if size is None:
                    raise ValueError(f"scratch of {node.op} '{node.name}' is {operand.nbytes} bytes, expected a*n + b")
                copies = 1 if operand.shared else self.threads
                buffer = Buffer(aligned(size.times(copies)), time, time)
                self.buffers.append(buffer)
                self.scratch[node, index] = buffer

    def _extend_lifetimes(self, last_read: Mapping[Value, int]) -> None:
        for buffer in self.buffers:
            buffer.last = max([buffer.last, *(last_read.get(value, buffer.first) for value in buffer.values)])


def _in_ports(graph: Graph, choice: Choice, ports: Ports) -> dict[Value, Place]:
    """The values that live in memory from outside: inputs, states, and what is computed straight into outputs and
    states."""
    places = {value: Place(base) for value, base in ports.of_inputs}
    places |= {state.value: Place(base) for state, base in ports.of_states}
    taken: set[Value] = set()
    for value, base in ports.of_outputs:
        root = choice.root(value)
        if root.producer is not None and root not in taken and plannable(root):
            places[root] = Place(base)
            taken.add(root)
    bases = dict(ports.of_states)
    for value, state in updated_in_place(graph, choice).items():
        places[value] = Place(bases[state])
    return places


def _by_time(times: Mapping[Node, int]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node, time in times.items():
        found.setdefault(time, []).append(node)
    return found
