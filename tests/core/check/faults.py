"""Faults of plans: each changes a correct plan so that it is wrong for some batch size.

A fault returns the changed plan, or None if the plan has no place for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from lathe.core.ir.graph import Value, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.kernels.call import In, Out, Packed, Request, Scratch
from lathe.core.kernels.choose import select
from lathe.core.kernels.control.selected_spec import SelectedSpec
from lathe.core.kernels.control.spec import Carried, Own, RepeatSpec
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import ARENA, Address, Fallback, PlannedGraph, Segment
from tests.core.check.cases import Case

Fault = Callable[[Case, Random], PlannedGraph | None]
Place = tuple[int, int]  # a step and one of its operands


def moved(address: Address, a: int = 0, b: int = 0) -> Address:
    return Address(address.base, Affine(address.offset.a + a, address.offset.b + b))


def with_operand(case: Case, place: Place, address: Address) -> PlannedGraph:
    """The plan with another address for one operand."""
    index, operand = place
    operands = list(case.plan.steps[index].operands)
    operands[operand] = address
    return with_step(case, index, operands=tuple(operands))


def with_step(case: Case, index: int, **changes: Any) -> PlannedGraph:
    steps = list(case.plan.steps)
    steps[index] = replace(steps[index], **changes)
    return case.but(steps=tuple(steps))


def operands(case: Case, *kinds: type) -> Iterator[tuple[Place, Value | None]]:
    """The operands of these kinds, each with its value if it has one."""
    for index, (node, call) in enumerate(case.planned.calls):
        for position, operand in enumerate(call.operands):
            if isinstance(operand, kinds):
                made = case.graph.nodes[node]
                value = None
                if isinstance(operand, In):
                    value = made.inputs[operand.index]
                elif isinstance(operand, Out):
                    value = made.outputs[operand.index]
                yield (index, position), value


def used(case: Case) -> set[Value]:
    """The values that a node reads, or that must exist at the end; views and concatenations do not count."""
    return {value for node in case.graph.nodes for value in node_reads(node)} | case.graph.live_outs()


def choose(rng: Random, options: list[Any]) -> Any:
    return rng.choice(options) if options else None


def address_at(case: Case, place: Place) -> Address:
    return case.plan.steps[place[0]].operands[place[1]]


# -- addresses --------------------------------------------------------------------------------------------------------


def shifted_operand(case: Case, rng: Random) -> PlannedGraph | None:
    """An operand is shifted by some bytes."""
    known = used(case)
    place = choose(rng, [place for place, value in operands(case, In, Out) if value in known])
    by = rng.choice((1, 4, 16, 64, 4096, -4, -64))
    return with_operand(case, place, moved(address_at(case, place), b=by)) if place else None


def another_growth(case: Case, rng: Random) -> PlannedGraph | None:
    """An operand has a wrong address for all batch sizes but one."""
    if not case.plan.arena.a:
        return None
    known = used(case)
    places = [place for place, value in operands(case, In, Out) if value in known and depends(value)]
    place = choose(rng, places)
    return with_operand(case, place, moved(address_at(case, place), a=64, b=-64)) if place else None


def depends(value: Value | None) -> bool:
    return value is not None and isinstance(value.type, TensorType) and "n" in value.type.symbols


def another_base(case: Case, rng: Random) -> PlannedGraph | None:
    """An operand has the base of another port."""
    known = used(case)
    place = choose(rng, [place for place, value in operands(case, In, Out) if value in known])
    if not place:
        return None
    address = address_at(case, place)
    ports = [port.base for port in (*case.plan.inputs, *case.plan.states, *case.plan.outputs)]
    base = choose(rng, [base for base in (ARENA, *ports) if base != address.base])
    return with_operand(case, place, Address(base, address.offset))


def exchanged_operands(case: Case, rng: Random) -> PlannedGraph | None:
    """Two operands of a step are swapped."""
    found = []
    for index, step in enumerate(case.plan.steps):
        mine = [place for place, _ in operands(case, In, Out) if place[0] == index]
        found += [(a, b) for a in mine for b in mine if a < b and step.operands[a[1]] != step.operands[b[1]]]
    pair = choose(rng, found)
    if not pair:
        return None
    (index, a), (_, b) = pair
    given = list(case.plan.steps[index].operands)
    given[a], given[b] = given[b], given[a]
    return with_step(case, index, operands=tuple(given))


def outside_the_arena(case: Case, rng: Random) -> PlannedGraph | None:
    """The arena is too small for some value or for scratch memory."""
    ends = [operand.offset.at(1) for step in case.plan.steps for operand in step.operands if operand.base == ARENA]
    return case.but(arena=Affine(b=max(ends))) if ends else None


def two_in_one_place(case: Case, rng: Random) -> PlannedGraph | None:
    """A value is placed over another value that is read later."""
    regions = [region for region in case.plan.regions if region.values]
    pairs = [(a, b) for a in regions for b in regions if a.first < b.first < a.last and a is not b]
    pair = choose(rng, pairs)
    if not pair:
        return None
    kept, gone = pair
    return _with_region(case, gone.offset, gone.size, gone.first, gone.last, kept.offset)


def _with_region(case: Case, offset: Affine, size: Affine, first: int, last: int, to: Affine) -> PlannedGraph:
    """The plan with the values of one region of the arena moved to the offset `to`."""
    names = next(
        r.values for r in case.plan.regions if (r.offset, r.size, r.first, r.last) == (offset, size, first, last)
    )
    by = Affine(to.a - offset.a, to.b - offset.b)
    inside = _inside(case, set(names))
    steps = [
        replace(
            step,
            operands=tuple(
                moved(operand, by.a, by.b) if (index, k) in inside else operand
                for k, operand in enumerate(step.operands)
            ),
        )
        for index, step in enumerate(case.plan.steps)
    ]
    located = {
        name: (moved(address, by.a, by.b), type_) if name in names else (address, type_)
        for name, (address, type_) in case.plan.value_addresses.items()
    }
    return case.but(steps=tuple(steps), value_addresses=located)


def _inside(case: Case, names: set[str]) -> set[Place]:
    """The places of operands that are these values, or views or parts of them."""
    family = {value for value in case.graph.values() if value.name in names}
    for node in case.graph.nodes:
        moves = node.op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Split", "Gather")
        if moves and node.inputs[0] in family:
            family.update(node.outputs)
    return {place for place, value in operands(case, In, Out) if value in family}


# -- order ------------------------------------------------------------------------------------------------------------


def _bound(case: Case) -> list[int]:
    """The steps whose result the next step of the same segment reads."""
    found = []
    ends = {entry.last for entry in case.plan.schedule if isinstance(entry, Segment)}
    for index in range(len(case.plan.steps) - 1):
        mine = {value for place, value in operands(case, Out) if place[0] == index}
        theirs = {value for place, value in operands(case, In) if place[0] == index + 1}
        if mine & theirs and index + 1 not in ends:
            found.append(index)
    return found


def no_barrier(case: Case, rng: Random) -> PlannedGraph | None:
    """The barrier between a step and a reader of its result is missing."""
    index = choose(rng, _bound(case))
    return with_step(case, index, has_barrier=False) if index is not None else None


def read_before_written(case: Case, rng: Random) -> PlannedGraph | None:
    """A step and a reader of its result are swapped."""
    index = choose(rng, _bound(case))
    return _exchanged(case, index) if index is not None else None


def _exchanged(case: Case, index: int) -> PlannedGraph:
    steps, calls = list(case.plan.steps), list(case.planned.calls)
    steps[index], steps[index + 1] = (
        replace(steps[index + 1], has_barrier=True),
        replace(steps[index], has_barrier=True),
    )
    calls[index], calls[index + 1] = calls[index + 1], calls[index]
    return replace(case.but(steps=tuple(steps)), calls=tuple(calls))


def missing_step(case: Case, rng: Random) -> PlannedGraph | None:
    """A step with a needed result is missing."""
    if len(case.plan.schedule) != 1:
        return None
    known = used(case)
    index = choose(rng, [place[0] for place, value in operands(case, Out) if value in known])
    if index is None:
        return None
    steps = tuple(step for k, step in enumerate(case.plan.steps) if k != index)
    calls = tuple(call for k, call in enumerate(case.planned.calls) if k != index)
    return replace(case.but(steps=steps, schedule=(Segment(0, len(steps)),), cut_points=()), calls=calls)


# -- scratch memory, weights, and missing memory -----------------------------------------------------------------------


def scratch_over_a_value(case: Case, rng: Random) -> PlannedGraph | None:
    """A step's scratch memory overlaps one of its operands."""
    places = [place for place, _ in operands(case, Scratch)]
    pairs = [
        (place, address_at(case, other))
        for place in places
        for other, value in operands(case, In, Out)
        if other[0] == place[0] and address_at(case, other).base == ARENA
    ]
    pair = choose(rng, pairs)
    return with_operand(case, *pair) if pair else None


def other_weights(case: Case, rng: Random) -> PlannedGraph | None:
    """The address of packed weights is shifted by some bytes."""
    place = choose(rng, [place for place, _ in operands(case, Packed)])
    return with_operand(case, place, moved(address_at(case, place), b=rng.choice((4, 64, -64)))) if place else None


def other_constant(case: Case, rng: Random) -> PlannedGraph | None:
    """The address of a constant is shifted by some bytes."""
    places = [place for place, value in operands(case, In) if value in case.graph.constants]
    place = choose(rng, places)
    return with_operand(case, place, moved(address_at(case, place), b=rng.choice((4, 64)))) if place else None


def numbers_of_another(case: Case, rng: Random) -> PlannedGraph | None:
    """Shared code gets the numbers of another step, in the plan alone or also in the call that it claims."""
    calls = [call for _, call in case.planned.calls]
    pairs = [
        (mine, other)
        for mine, a in enumerate(calls)
        for other, b in enumerate(calls)
        if a.shared and b.shared and a.code.key == b.code.key and a.spec.key != b.spec.key
    ]
    if not pairs:
        return None
    mine, other = rng.choice(pairs)
    *own, _ = calls[mine].operands
    wrong = with_operand(case, (mine, len(own)), case.plan.steps[other].operands[-1])
    claimed = replace(calls[mine], operands=(*own, calls[other].operands[-1]))
    return rng.choice((wrong, replace(wrong, calls=case.calls(mine, claimed))))


def dense_kernel(case: Case, rng: Random) -> PlannedGraph | None:
    """A kernel for contiguous operands runs on operands that are parts of other tensors."""
    found = []
    for index, (place, call) in enumerate(case.planned.calls):
        node = case.graph.nodes[place]
        dense = select(Request(node, case.graph.constants, case.target, case.plan.threads))
        if dense is not None and call.strided and dense.spec.key != call.spec.key and dense.operands == call.operands:
            found.append((index, dense))
    if not found:
        return None
    index, dense = rng.choice(found)
    planned = with_step(case, index, symbol=dense.spec.symbol)
    specs = {**planned.specs, dense.spec.symbol: dense.spec}
    return replace(planned, specs=specs, calls=case.calls(index, dense))


# -- cut points, states, outputs, fallbacks ----------------------------------------------------------------------------


def shifted_cut_point(case: Case, rng: Random) -> PlannedGraph | None:
    return _with_cut_point(case, rng, lambda cut: replace(cut, place=Affine(cut.place.a, cut.place.b + 64)))


def cut_point_of_other_rows(case: Case, rng: Random) -> PlannedGraph | None:
    return _with_cut_point(case, rng, lambda cut: replace(cut, row=cut.row - 4))


def cut_point_without_memory(case: Case, rng: Random) -> PlannedGraph | None:
    return _with_cut_point(case, rng, lambda cut: replace(cut, arena=Affine(b=cut.place.at(1) + cut.row)))


def cut_point_elsewhere(case: Case, rng: Random) -> PlannedGraph | None:
    """A cut point is one step too late: another value is then live across it."""
    known = used(case)
    made = {
        place[0]: address_at(case, place)
        for place, value in operands(case, Out)
        if value in known and address_at(case, place).base == ARENA
    }
    return _with_cut_point(
        case, rng, lambda cut: replace(cut, step=cut.step + 1)
        if cut.step in made and made[cut.step].offset != cut.place else None,
    )  # fmt: skip


def _with_cut_point(case: Case, rng: Random, change: Callable[[Any], Any]) -> PlannedGraph | None:
    cut_points = [new for cut in case.plan.cut_points if (new := change(cut)) is not None]
    return case.but(cut_points=(rng.choice(cut_points),)) if cut_points else None


def missing_copy(case: Case, rng: Random) -> PlannedGraph | None:
    """The copy into an output or a state is missing."""
    if not case.plan.copies:
        return None
    gone = rng.randrange(len(case.plan.copies))
    return case.but(copies=tuple(copy for k, copy in enumerate(case.plan.copies) if k != gone))


def copies_to_each_other(case: Case, rng: Random) -> PlannedGraph | None:
    """The copies into two ports are swapped."""
    bases = {base for _, base in case.plan.copies}
    if len(bases) < 2 or len({name for name, _ in case.plan.copies}) < 2:
        return None
    (a, x), (b, y), *rest = case.plan.copies
    return case.but(copies=((a, y), (b, x), *rest))


def located_elsewhere(case: Case, rng: Random) -> PlannedGraph | None:
    """A fallback reads or writes a value at a shifted address."""
    native = {value.name for _, value in operands(case, In, Out) if value is not None}
    outputs = {value.name for node in case.plan.fallbacks.nodes for value in node.outputs}
    read = {value.name for node in case.plan.fallbacks.nodes for value in node_reads(node)}
    names = [name for name in case.plan.value_addresses if name in native and name in outputs | read]
    names = [name for name in names if name not in {port.name for port in case.plan.inputs}]
    name = choose(rng, names)
    if name is None:
        return None
    address, type_ = case.plan.value_addresses[name]
    return case.but(value_addresses={**case.plan.value_addresses, name: (moved(address, b=64), type_)})


def fallback_first(case: Case, rng: Random) -> PlannedGraph | None:
    """A fallback runs before the steps that compute its inputs."""
    schedule = list(case.plan.schedule)
    at = next((k for k, entry in enumerate(schedule) if isinstance(entry, Fallback) and k), None)
    if at is None:
        return None
    schedule[at - 1], schedule[at] = schedule[at], schedule[at - 1]
    return case.but(schedule=tuple(schedule))


# -- bodies -----------------------------------------------------------------------------------------------------------


def _with_loop(case: Case, change: Callable[[RepeatSpec], RepeatSpec]) -> PlannedGraph | None:
    for index, (_, call) in enumerate(case.planned.calls):
        if isinstance(call.spec, RepeatSpec):
            spec = change(call.spec)
            planned = with_step(case, index, symbol=spec.symbol)
            specs = {**planned.specs, spec.symbol: spec}
            return replace(planned, specs=specs, calls=case.calls(index, replace(call, spec=spec)))
    return None


def body_over_its_flags(case: Case, rng: Random) -> PlannedGraph | None:
    """The arena of a body overlaps the function's flags."""
    return _with_loop(case, lambda spec: replace(spec, tape=replace(spec.tape, bases=(Own(64), *spec.tape.bases[1:]))))


def one_buffer_for_two(case: Case, rng: Random) -> PlannedGraph | None:
    """One buffer holds the results of an iteration and those of the next one."""

    def change(spec: RepeatSpec) -> RepeatSpec:
        first, *rest = spec.carried
        return replace(spec, carried=(replace(first, buffers=(first.buffers[0],) * 2), *rest))

    return _with_loop(case, change)


def carried_in_place(case: Case, rng: Random) -> PlannedGraph | None:
    """A body writes a carried value into the buffer that it reads."""

    def change(spec: RepeatSpec) -> RepeatSpec:
        bases = tuple(Carried(base.index) if isinstance(base, Carried) else base for base in spec.tape.bases)
        return replace(spec, tape=replace(spec.tape, bases=bases))

    return _with_loop(case, change)


def body_without_a_move(case: Case, rng: Random) -> PlannedGraph | None:
    """A move at the end of a body is missing."""
    return _with_loop(case, lambda spec: replace(spec, tape=replace(spec.tape, moves=()))) if _moves(case) else None


def _moves(case: Case) -> bool:
    specs = [call.spec for _, call in case.planned.calls]
    return any(isinstance(spec, RepeatSpec) and spec.tape.moves for spec in specs)


def body_of_shifted_steps(case: Case, rng: Random) -> PlannedGraph | None:
    """A step of a body writes 64 bytes further, both in the loop and in the plan of the body."""
    for index, (place, call) in enumerate(case.planned.calls):
        if isinstance(call.spec, RepeatSpec):
            body = case.planned.bodies[place][0]
            inner = Case("body", case.graph.nodes[place].subgraphs[0], body, case.target)
            at = rng.randrange(len(body.plan.steps))
            planned = with_operand(inner, (at, 0), moved(body.plan.steps[at].operands[0], b=64))
            called = call.spec.tape.calls[at]
            place_ = replace(called.operands[0], offset=called.operands[0].offset + 64)
            calls = list(call.spec.tape.calls)
            calls[at] = replace(called, operands=(place_, *called.operands[1:]))
            spec = replace(call.spec, tape=replace(call.spec.tape, calls=tuple(calls)))
            whole = with_step(case, index, symbol=spec.symbol)
            specs = {**whole.specs, spec.symbol: spec}
            bodies = {**case.planned.bodies, place: (planned,)}
            return replace(whole, specs=specs, bodies=bodies, calls=case.calls(index, replace(call, spec=spec)))
    return None


def _with_map(case: Case, change: Callable[[SelectedSpec], SelectedSpec]) -> PlannedGraph | None:
    for index, (_, call) in enumerate(case.planned.calls):
        if isinstance(call.spec, SelectedSpec):
            spec = change(call.spec)
            planned = with_step(case, index, symbol=spec.symbol)
            specs = {**planned.specs, spec.symbol: spec}
            return replace(planned, specs=specs, calls=case.calls(index, replace(call, spec=spec)))
    return None


def results_over_gathered_rows(case: Case, rng: Random) -> PlannedGraph | None:
    """A body writes its results over the rows that it reads."""

    def change(spec: SelectedSpec) -> SelectedSpec:
        rows = spec.sources[0].rows
        return replace(spec, results=rows, tape=replace(spec.tape, bases=(*spec.tape.bases[:-1], Own(rows))))

    return _with_map(case, change)


def exchanged_sources(case: Case, rng: Random) -> PlannedGraph | None:
    """Rows of one source are gathered from another."""

    def change(spec: SelectedSpec) -> SelectedSpec:
        one, other, *rest = spec.sources
        exchanged = replace(one, operand=other.operand), replace(other, operand=one.operand)
        return replace(spec, sources=(*exchanged, *rest))

    return _with_map(case, change)


def map_of_fewer_rows(case: Case, rng: Random) -> PlannedGraph | None:
    """Some rows of the result are left out."""
    return _with_map(case, lambda spec: replace(spec, rows=spec.rows - 1))


def indices_outside_the_scratch(case: Case, rng: Random) -> PlannedGraph | None:
    """The indices of the selected rows end outside a thread's scratch memory."""
    return _with_map(case, lambda spec: replace(spec, row_indices=spec.scratch_bytes - 64))


FAULTS: tuple[Fault, ...] = (
    shifted_operand, another_growth, another_base, exchanged_operands, outside_the_arena, two_in_one_place, no_barrier,
    read_before_written, missing_step, scratch_over_a_value, other_weights, other_constant, numbers_of_another,
    dense_kernel, shifted_cut_point, cut_point_of_other_rows, cut_point_without_memory, cut_point_elsewhere,
    missing_copy,
    copies_to_each_other, located_elsewhere, fallback_first, body_over_its_flags, one_buffer_for_two, carried_in_place,
    body_without_a_move, body_of_shifted_steps, results_over_gathered_rows, exchanged_sources, map_of_fewer_rows,
    indices_outside_the_scratch,
)  # fmt: skip
