"""Symbolic execution of a plan for one batch size, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from lathe.core.check.aliases import Aliases
from lathe.core.check.boxes import Box, Layout, Spans
from lathe.core.check.cut_points import cross_cut_point
from lathe.core.check.facts import Facts, Sizes, StepFacts, base_name
from lathe.core.check.in_place import may_run_in_place
from lathe.core.check.memory import Memory
from lathe.core.check.transfers import TransferCheck
from lathe.core.check.weights import Weights
from lathe.core.errors import PlanError
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Node, Value, node_reads
from lathe.core.kernels.call import In, Out, Outer, Scratch
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import ARENA, WEIGHTS, Address, Fallback, Segment

_NUMBER = 48  # bits for a byte's number within a tensor; the bits above are the number of the tensor


@dataclass(frozen=True, slots=True)
class Access:
    """The bytes that operand number `operand` of a step reads or writes, relative to base number `base`.

    `value` and `layout` are None for scratch memory. `shift` identifies the tensor and its address (see `Memory`).
    """

    step: StepFacts
    operand: int
    base: int
    spans: Spans
    writes: bool
    value: Value | None = None
    layout: Layout | None = None
    shift: int = 0

    def __str__(self) -> str:
        what = f"%{self.value.name}" if self.value is not None else "scratch memory"
        return f"{self.step}, operand {self.operand} ({'writes' if self.writes else 'reads'} {what})"

    @property
    def is_read(self) -> bool:
        return not self.writes


class SymbolicRun:
    """The state of executing a plan for a batch of `n`: for each base a `Memory`, which records what bytes hold."""

    def __init__(self, facts: Facts, sizes: Sizes, same: Aliases, weights: Weights) -> None:
        self.facts, self.plan, self.sizes, self.aliases, self.weights = facts, facts.plan, sizes, same, weights
        self.n = sizes.n
        self.memory = {ARENA: Memory(self.plan.arena.at(self.plan.address_rows(self.n)))}
        self._extent = self.plan.arena.at(self.plan.address_rows(self.n))
        self._numbers: dict[Value, int] = {}
        self._holders: list[Value | str] = []  # by number: homes, and scratch memory
        self._kept: set[str] = set()  # names of the values that the runtime keeps outside the plan's memory
        self._cut_points = {cut.step: cut for cut in self.plan.cut_points}
        self._transfers = TransferCheck(self)
        self._fill_ports()

    def check(self) -> None:
        """Execute the schedule. PlanError at the first fault."""
        for entry in self.plan.schedule:
            if isinstance(entry, Segment):
                self._run_segment(entry)
            else:
                self._run_fallback(entry)
        self._end()

    # -- start and end of the run --------------------------------------------------------------------------------------

    def _fill_ports(self) -> None:
        graph, plan = self.facts.graph, self.plan
        for port, value in zip(plan.inputs, graph.inputs, strict=True):
            self.memory[port.base] = Memory(None)
            self._hold(port.base, value)
            self._kept.add(value.name)
        for port, state in zip(plan.states, graph.states, strict=True):
            self.memory[port.base] = Memory(self._nbytes(state.value))
            self._hold(port.base, state.value)
        for port, value in zip(plan.outputs, graph.outputs, strict=True):
            self.memory[port.base] = Memory(self._nbytes(value))

    def _hold(self, base: int, value: Value) -> None:
        box = self.aliases.box(value)
        if box is not None:
            self.memory[base].write(box.spans(), self._shift(box, 0))

    def _nbytes(self, value: Value) -> int | None:
        shape = self.sizes.shape(value)
        return None if shape is None else prod(shape) * value.dtype.itemsize

    def _end(self) -> None:
        """Make the final copies, then check that every output and every state has its value."""
        graph, plan = self.facts.graph, self.plan
        self._transfers.cross(len(plan.steps))
        states = {port.base for port in plan.states}
        copies = [(self._value_named(name), base) for name, base in plan.copies]
        for value, base in copies:
            self._find_whole(value, f"the copy to {base_name(plan, base)}")
            if base not in states:
                self._replace(base, value)
        for value, base in copies:  # the runtime reads all values before it writes a state
            if base in states:
                self._replace(base, value)
        results = [*zip(plan.outputs, graph.outputs, strict=True)]
        results += zip(plan.states, (state.update for state in graph.states), strict=True)
        for port, value in results:
            if self.aliases.box(value) is not None:
                self._find_at(value, Address(port.base), "at the end")
            elif (value, port.base) not in copies:
                raise PlanError(f"%{value.name} is not copied to {base_name(plan, port.base)}")

    def _replace(self, base: int, value: Value) -> None:
        """Record that a value was copied, row-major, to the port at `base`; PlanError if the port has another size."""
        box, memory = self.aliases.box(value), self.memory.get(base)
        if memory is None or base < WEIGHTS or self._nbytes(value) != memory.size:
            raise PlanError(f"%{value.name} is copied to {base_name(self.plan, base)}, which is of another size")
        if box is None or memory.size is None:
            return
        memory.wipe(0, memory.size)
        memory.write(box.spans().moved(-box.start), self._shift(box, 0))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _run_segment(self, segment: Segment) -> None:
        stage: list[StepFacts] = []
        for each in self.facts.steps[segment.first : segment.last]:
            if each.index in self._cut_points:
                if stage:
                    raise PlanError(f"{each} follows a cut point inside a stage")
                self._extent = min(self._extent, cross_cut_point(self, self._cut_points[each.index]))
            self._transfers.cross(each.index)
            stage.append(each)
            if each.step.has_barrier:
                self._run_stage(stage)
                stage = []
        if stage:
            self._run_stage(stage)

    def _run_stage(self, stage: Sequence[StepFacts]) -> None:
        """Execute the steps of a stage, which may run in any order and concurrently."""
        by_step = [list(self._accesses(each)) for each in stage]
        for accesses in by_step:
            for access in accesses:
                self._check_bounds(access)
                if access.is_read:
                    self._check_content(access)
            self._check_within_step(accesses)
        if len(by_step) > 1:
            self._check_between_steps(by_step)
        for access in (each for accesses in by_step for each in accesses if each.writes and each.spans.starts):
            self.memory[access.base].write(access.spans, access.shift)

    def _accesses(self, each: StepFacts) -> Iterator[Access]:
        for index, (operand, address, value) in enumerate(
            zip(each.call.operands, each.step.operands, each.values, strict=True)
        ):
            at = self.sizes.at(address)
            if isinstance(operand, Scratch):
                nbytes = self._dim(operand.nbytes) * (1 if operand.shared else self.plan.threads)
                spans = Spans([at] if nbytes else [], nbytes)
                yield Access(each, index, address.base, spans, True, shift=self.claim(f"scratch memory of {each}"))
            elif value is None:
                self.weights.check_operand(each, index, self._transfers.origin_of(address))
            elif value in self.facts.graph.constants and isinstance(operand, In | Outer):
                self._check_constant(each, index, value, self._transfers.origin_of(address))
            else:
                yield self._access(each, index, value, address.base, at, isinstance(operand, Out))

    def _access(self, each: StepFacts, index: int, value: Value, base: int, at: int, writes: bool) -> Access:
        box = self.aliases.box(value)
        if box is None:
            raise PlanError(f"{each}, operand {index}: %{value.name} is {value.type}, which has no place in memory")
        if box.home in self.facts.graph.constants and not writes:
            origin = self._transfers.origin_of(Address(base, Affine(b=at)))
            base, at = origin.base, origin.offset.b
            self.weights.check_constant(each, index, box, base, at)
            return Access(each, index, base, Spans([], 0), False, value, replace(box, start=at))
        layout = Layout(at, box.shape, box.strides, box.itemsize)
        return Access(each, index, base, box.spans().moved(at - box.start), writes, value, layout, self._shift(box, at))

    def _check_constant(self, each: StepFacts, index: int, value: Value, address: Address) -> None:
        box = self.aliases.box(value)
        if box is None:
            raise PlanError(f"{each}, operand {index}: %{value.name} is {value.type}, which no kernel reads")
        self.weights.check_constant(each, index, box, address.base, self.sizes.at(address))

    def _check_bounds(self, access: Access) -> None:
        low, high = access.spans.hull
        if low == high:
            return
        memory = self.memory.get(access.base)
        if memory is None:
            raise self._error(access, low, high, "which is no memory of the plan")
        limit = self._extent if access.base == ARENA else memory.size
        if limit is None and access.writes:
            raise self._error(access, low, high, "which is read-only")
        if low < 0 or (limit is not None and high > limit):
            raise self._error(access, low, high, f"expected from 0 to {limit}")
        if access.value is None and low % 64:
            raise self._error(access, low, high, "expected a multiple of 64 bytes")
        if access.layout is not None:
            alignment = max(self.facts.alignment, access.layout.itemsize)
            if access.layout.start % alignment:
                raise self._error(access, low, high, f"expected a multiple of {alignment} bytes")

    def _check_content(self, access: Access) -> None:
        if not access.spans.starts:
            return  # an empty value, or a constant, whose content is compared instead
        memory = self.memory.get(access.base)
        lacking = memory.lacks(access.spans, access.shift) if memory is not None else access.spans.hull
        if lacking is not None:
            raise self._error(access, *lacking, f"which hold {self._content(access.base, *lacking)}")

    def _check_within_step(self, accesses: Sequence[Access]) -> None:
        """PlanError if a step writes bytes that it also reads or writes, except for in-place results."""
        for one, other in combinations(accesses, 2):
            if one.base != other.base or not (one.writes or other.writes) or not one.spans.overlaps(other.spans):
                continue
            read, write = (one, other) if other.writes else (other, one)
            if read.writes or not self._is_in_place(read, write):
                raise self._error(write, *write.spans.hull, f"and so does {read}")

    def _is_in_place(self, read: Access, write: Access) -> bool:
        step, source, target = read.step, read.layout, write.layout
        input_, output = step.call.operands[read.operand], step.call.operands[write.operand]
        if source is None or target is None or not isinstance(input_, In) or not isinstance(output, Out):
            return False
        if step.node.op == "Concat":
            return read.value in self.aliases.inside.get(step.node, ()) and output.index == 0
        return may_run_in_place(step.node, step.call.spec, input_.index, source, output.index, target)

    def _check_between_steps(self, by_step: Sequence[Sequence[Access]]) -> None:
        """PlanError if a step writes bytes that another step of the same stage reads or writes."""
        for mine, theirs in combinations(by_step, 2):
            for one in mine:
                for other in theirs:
                    may_conflict = one.base == other.base and (one.writes or other.writes)
                    if may_conflict and one.spans.overlaps(other.spans):
                        raise self._error(one, *one.spans.hull, f"and concurrently {other}")

    # -- fallbacks, which read and write row-major values --------------------------------------------------------------

    def _run_fallback(self, entry: Fallback) -> None:
        node = self.plan.fallbacks.nodes[entry.index]
        where = f"fallback {entry.index} ({node.op} '{node.name}')"
        if not self.facts.alone:
            raise PlanError(f"{where} is part of a body, which runs in native code")
        for value in dict.fromkeys(node_reads(node)):
            if value not in self.facts.graph.constants:
                self._find_whole(value, where)
        for value in node.outputs:
            self._kept.add(value.name)
            if value.name in self.plan.value_addresses:
                self._write_fallback(node, value, where)

    def _write_fallback(self, node: Node, value: Value, where: str) -> None:
        address, box = self._location(value, where), self.aliases.box(value)
        if box is None:
            raise PlanError(f"{where} writes %{value.name}, which is {value.type}, into memory")
        at = self.sizes.at(address)
        spans, memory = box.spans().moved(at - box.start), self.memory.get(address.base)
        low, high = spans.hull
        limit = memory.size if memory is not None else None
        if low < high and (not box.is_dense or memory is None or limit is None or low < 0 or high > limit):
            place = f"bytes {low} to {high} of {base_name(self.plan, address.base)}"
            raise PlanError(f"{where} writes %{value.name} to {place}, expected from 0 to {limit}, for n = {self.n}")
        if memory is not None:
            memory.write(spans, self._shift(box, at))

    def _find_whole(self, value: Value, where: str) -> None:
        """PlanError unless the runtime keeps the value outside the plan's memory, or the plan's memory holds it.

        In memory, the whole value must be at the address that the plan states, row-major. `where` begins the message.
        """
        if value.name in self._kept and self.facts.runtime_keeps_values:
            return
        self._find_at(value, self._location(value, where), where)

    def _location(self, value: Value, where: str) -> Address:
        if value.name not in self.plan.value_addresses:
            raise PlanError(f"{where} reads or writes %{value.name}, which has no location in the plan")
        address, type_ = self.plan.value_addresses[value.name]
        if type_ != value.type:
            raise PlanError(f"{where}: %{value.name} has an address for {type_}, expected {value.type}")
        return address

    def _find_at(self, value: Value, address: Address, where: str) -> None:
        """PlanError unless the whole value is at this address, row-major."""
        box = self.aliases.box(value)
        if box is None:
            raise PlanError(f"{where}: %{value.name} is {value.type}, which has no place in memory")
        if box.home in self.facts.graph.constants and address.base == WEIGHTS:
            self.weights.check_constant(where, None, box, address.base, self.sizes.at(address))
            return
        self._find(value, address.base, box, self.sizes.at(address), where)

    def _find(self, value: Value, base: int, box: Box, at: int, where: str) -> None:
        memory, spans = self.memory.get(base), box.spans().moved(at - box.start)
        name = base_name(self.plan, base)
        if not box.is_dense:
            raise PlanError(f"{where}: %{value.name} is a strided part of %{box.home.name}, expected row-major")
        lacking = memory.lacks(spans, self._shift(box, at)) if memory is not None else spans.hull
        if lacking is not None:
            held = self._content(base, *lacking)
            place = f"bytes {lacking[0]} to {lacking[1]} of {name}"
            raise PlanError(f"{where}: {place} should hold %{value.name}, but hold {held}, for n = {self.n}")

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _shift(self, box: Box, at: int) -> int:
        """The shift (see `Memory`) of the home of `box`, if the first element of the box is at address `at`."""
        number = self._numbers.get(box.home)
        if number is None:
            number = self._numbers[box.home] = len(self._holders)
            self._holders.append(box.home)
        return at - box.start - (number << _NUMBER)

    def claim(self, what: str) -> int:
        """A new shift, which no tensor has, for memory that holds no value; `what` names it in messages."""
        self._holders.append(what)
        return -(len(self._holders) - 1 << _NUMBER)

    def origin(self, address: int, shift: int) -> tuple[Value | str, int]:
        """The tensor with this shift (or the name of scratch memory), and the number of its byte at this address."""
        number, byte = divmod(address - shift, 1 << _NUMBER)
        return self._holders[number], byte

    def _value_named(self, name: str) -> Value:
        if name not in self.facts.names:
            raise PlanError(f"the plan copies %{name}, which the graph does not have")
        return self.facts.names[name]

    def _dim(self, dim: Dim) -> int:
        """The value of a size; for an empty batch, that of a batch of one."""
        return dim if isinstance(dim, int) else Sizes(max(self.n, 1)).dim(dim)

    def _content(self, base: int, low: int, high: int) -> str:
        """The names of the values that a range of bytes holds, for messages; "nothing" if there are none."""
        memory = self.memory.get(base)
        runs = memory.runs(low, high) if memory is not None else ()
        holders = dict.fromkeys(self.origin(first, shift)[0] for first, _, shift in runs)
        found = [holder if isinstance(holder, str) else f"%{holder.name}" for holder in holders]
        return ", ".join(found) or "nothing"

    def _error(self, access: Access, low: int, high: int, why: str) -> PlanError:
        place = f"bytes {low} to {high} of {base_name(self.plan, access.base)}"
        return PlanError(f"{access}: {place}, {why}, for n = {self.n}")
