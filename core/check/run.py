"""A plan followed step by step for one batch size, with symbolic memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from core.check.boxes import Box, Layout, Spans
from core.check.facts import Facts, Sizes, StepFacts, base_name
from core.check.identity import Identities
from core.check.memory import Memory
from core.check.replacing import may_replace
from core.check.seams import cross
from core.check.weights import Weights
from core.errors import PlanError
from core.ir.dim import Dim
from core.ir.graph import Node, Value, node_reads
from core.kernels.catalog.base import In, Out, Outer, Scratch
from core.plan.plan import ARENA, WEIGHTS, Address, Fallback, Segment

_NUMBER = 48  # bits: no tensor has more bytes; a shift says which home and where


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an operand of a step reads or writes. `value`: None for scratch memory."""

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


class Run:
    """The memory behind every base of a plan, while its steps run for a batch of `n`."""

    def __init__(self, facts: Facts, sizes: Sizes, same: Identities, weights: Weights) -> None:
        self.facts, self.plan, self.sizes, self.same, self.weights = facts, facts.plan, sizes, same, weights
        self.n = sizes.n
        self.memory = {ARENA: Memory(self.plan.arena.at(max(self.n, 1)))}
        self._extent = self.plan.arena.at(max(self.n, 1))
        self._numbers: dict[Value, int] = {}
        self._holders: list[Value | str] = []  # by number: homes, and what else claims memory
        self._kept: set[str] = set()  # values that the runtime keeps besides the plan's memory
        self._seams = {seam.step: seam for seam in self.plan.seams}
        self._fill_ports()

    def check(self) -> None:
        """Follow the schedule. PlanError at the first fault."""
        for entry in self.plan.schedule:
            if isinstance(entry, Segment):
                self._run_segment(entry)
            else:
                self._run_fallback(entry)
        self._end()

    # -- where the run begins and ends ---------------------------------------------------------------------------------

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
        box = self.same.box(value)
        if box is not None:
            self.memory[base].write(box.spans(), self._shift(box, 0))

    def _nbytes(self, value: Value) -> int | None:
        shape = self.sizes.shape(value)
        return None if shape is None else prod(shape) * value.dtype.itemsize

    def _end(self) -> None:
        """Copies; and then every output and every state must have its value."""
        graph, plan = self.facts.graph, self.plan
        states = {port.base for port in plan.states}
        copies = [(self._named(name), base) for name, base in plan.copies]
        for value, base in copies:
            self._find_whole(value, f"the copy to {base_name(plan, base)}")
            if base not in states:
                self._replace(base, value)
        for value, base in copies:  # the runtime reads all of them before it writes any state
            if base in states:
                self._replace(base, value)
        due = [*zip(plan.outputs, graph.outputs, strict=True)]
        due += zip(plan.states, (state.update for state in graph.states), strict=True)
        for port, value in due:
            if self.same.box(value) is not None:
                self._find_at(value, Address(port.base), "at the end")
            elif (value, port.base) not in copies:
                raise PlanError(f"%{value.name} is not copied to {base_name(plan, port.base)}")

    def _replace(self, base: int, value: Value) -> None:
        """A port has received a value as a whole."""
        box, memory = self.same.box(value), self.memory.get(base)
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
            if each.index in self._seams:
                if stage:
                    raise PlanError(f"{each} begins a seam inside a stage")
                self._extent = min(self._extent, cross(self, self._seams[each.index]))
            stage.append(each)
            if each.step.meets:
                self._run_stage(stage)
                stage = []
        if stage:
            self._run_stage(stage)

    def _run_stage(self, stage: Sequence[StepFacts]) -> None:
        """Steps that may run in any order, and at once."""
        made = [list(self._accesses(each)) for each in stage]
        for accesses in made:
            for access in accesses:
                self._check_bounds(access)
                if access.is_read:
                    self._check_held(access)
            self._check_alone(accesses)
        if len(made) > 1:
            self._check_beside(made)
        for access in (each for accesses in made for each in accesses if each.writes and each.spans.starts):
            self.memory[access.base].write(access.spans, access.shift)

    def _accesses(self, each: StepFacts) -> Iterator[Access]:
        for index, (operand, address, value) in enumerate(
            zip(each.call.operands, each.step.operands, each.values, strict=True)
        ):
            at = self.sizes.at(address)
            if isinstance(operand, Scratch):
                nbytes = self._dim(operand.nbytes) * (1 if operand.shared else self.plan.threads)
                spans = Spans([at] if nbytes else [], nbytes)
                yield Access(each, index, address.base, spans, True, shift=self._claim(f"scratch memory of {each}"))
            elif value is None:
                self.weights.check_operand(each, index, address)
            elif value in self.facts.graph.constants and isinstance(operand, In | Outer):
                self._check_constant(each, index, value, address)
            else:
                yield self._access(each, index, value, address.base, at, isinstance(operand, Out))

    def _access(self, each: StepFacts, index: int, value: Value, base: int, at: int, writes: bool) -> Access:
        box = self.same.box(value)
        if box is None:
            raise PlanError(f"{each}, operand {index}: %{value.name} is {value.type}, which has no place in memory")
        if box.home in self.facts.graph.constants and not writes:
            self.weights.check_constant(each, index, box, base, at)
            return Access(each, index, base, Spans([], 0), False, value, replace(box, start=at))
        layout = Layout(at, box.shape, box.strides, box.itemsize)
        return Access(each, index, base, box.spans().moved(at - box.start), writes, value, layout, self._shift(box, at))

    def _check_constant(self, each: StepFacts, index: int, value: Value, address: Address) -> None:
        box = self.same.box(value)
        if box is None:
            raise PlanError(f"{each}, operand {index}: %{value.name} is {value.type}, which no kernel reads")
        self.weights.check_constant(each, index, box, address.base, self.sizes.at(address))

    def _check_bounds(self, access: Access) -> None:
        low, high = access.spans.hull
        if low == high:
            return
        memory = self.memory.get(access.base)
        if memory is None:
            raise self._error(access, low, high, "there is no memory of the plan's own")
        limit = self._extent if access.base == ARENA else memory.size
        if limit is None and access.writes:
            raise self._error(access, low, high, "which nobody may write")
        if low < 0 or (limit is not None and high > limit):
            raise self._error(access, low, high, f"expected from 0 to {limit}")
        if access.value is None and low % 64:
            raise self._error(access, low, high, "expected a multiple of 64 bytes")
        if access.layout is not None:
            alignment = max(self.facts.alignment, access.layout.itemsize)
            if access.layout.start % alignment:
                raise self._error(access, low, high, f"expected a multiple of {alignment} bytes")

    def _check_held(self, access: Access) -> None:
        if not access.spans.starts:
            return  # of a constant, which is checked by what it holds
        memory = self.memory.get(access.base)
        lacking = memory.lacks(access.spans, access.shift) if memory is not None else access.spans.hull
        if lacking is not None:
            raise self._error(access, *lacking, f"which hold {self._content(access.base, *lacking)}")

    def _check_alone(self, accesses: Sequence[Access]) -> None:
        """A step writes nothing that it reads, except in place."""
        for one, other in combinations(accesses, 2):
            if one.base != other.base or not (one.writes or other.writes) or not one.spans.overlaps(other.spans):
                continue
            read, write = (one, other) if other.writes else (other, one)
            if read.writes or not self._is_in_place(read, write):
                raise self._error(write, *write.spans.hull, f"and so does {read}")

    def _is_in_place(self, read: Access, write: Access) -> bool:
        step, source, target = read.step, read.layout, write.layout
        given, made = step.call.operands[read.operand], step.call.operands[write.operand]
        if source is None or target is None or not isinstance(given, In) or not isinstance(made, Out):
            return False
        if step.node.op == "Concat":
            return read.value in self.same.inside.get(step.node, ()) and made.index == 0
        return may_replace(step.node, step.call.spec, given.index, source, made.index, target)

    def _check_beside(self, made: Sequence[Sequence[Access]]) -> None:
        """Steps of one stage write nothing that others of it use."""
        for mine, theirs in combinations(made, 2):
            for one in mine:
                for other in theirs:
                    together = one.base == other.base and (one.writes or other.writes)
                    if together and one.spans.overlaps(other.spans):
                        raise self._error(one, *one.spans.hull, f"and beside it {other}")

    # -- fallbacks, which read and write values that lie row-major -----------------------------------------------------

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
            if value.name in self.plan.located:
                self._write_fallback(node, value, where)

    def _write_fallback(self, node: Node, value: Value, where: str) -> None:
        address, box = self._location(value, where), self.same.box(value)
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
        """A value that the runtime reads must be kept by it, or lie where the plan says."""
        if value.name in self._kept and self.facts.keeps_values:
            return
        self._find_at(value, self._location(value, where), where)

    def _location(self, value: Value, where: str) -> Address:
        if value.name not in self.plan.located:
            raise PlanError(f"{where} reads or writes %{value.name}, whose place the plan does not say")
        address, type_ = self.plan.located[value.name]
        if type_ != value.type:
            raise PlanError(f"{where}: %{value.name} is located as {type_}, expected {value.type}")
        return address

    def _find_at(self, value: Value, address: Address, where: str) -> None:
        """A value must lie there as a whole, row-major."""
        box = self.same.box(value)
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
            raise PlanError(f"{where}: %{value.name} lies apart inside %{box.home.name}, expected row-major")
        lacking = memory.lacks(spans, self._shift(box, at)) if memory is not None else spans.hull
        if lacking is not None:
            held = self._content(base, *lacking)
            place = f"bytes {lacking[0]} to {lacking[1]} of {name}"
            raise PlanError(f"{where}: {place} should hold %{value.name}, and hold {held}, for n = {self.n}")

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _shift(self, box: Box, at: int) -> int:
        """What stands for the home of a box whose first byte lies at address `at`."""
        number = self._numbers.get(box.home)
        if number is None:
            number = self._numbers[box.home] = len(self._holders)
            self._holders.append(box.home)
        return at - box.start - (number << _NUMBER)

    def _claim(self, what: str) -> int:
        """A shift for memory that holds no value."""
        self._holders.append(what)
        return -(len(self._holders) - 1 << _NUMBER)

    def origin(self, address: int, shift: int) -> tuple[Value | str, int]:
        """What a shift says is at an address, and which of its bytes."""
        number, byte = divmod(address - shift, 1 << _NUMBER)
        return self._holders[number], byte

    def _named(self, name: str) -> Value:
        if name not in self.facts.names:
            raise PlanError(f"the plan copies %{name}, which the graph does not have")
        return self.facts.names[name]

    def _dim(self, dim: Dim) -> int:
        """Sizes of an empty batch are those of a batch of one."""
        return dim if isinstance(dim, int) else Sizes(max(self.n, 1)).dim(dim)

    def _content(self, base: int, low: int, high: int) -> str:
        """What lies somewhere, for people."""
        memory = self.memory.get(base)
        runs = memory.runs(low, high) if memory is not None else ()
        holders = dict.fromkeys(self.origin(first, shift)[0] for first, _, shift in runs)
        found = [holder if isinstance(holder, str) else f"%{holder.name}" for holder in holders]
        return ", ".join(found) or "nothing that was written"

    def _error(self, access: Access, low: int, high: int, why: str) -> PlanError:
        place = f"bytes {low} to {high} of {base_name(self.plan, access.base)}"
        return PlanError(f"{access}: {place}, {why}, for n = {self.n}")
