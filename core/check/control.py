"""Checks nodes with bodies that are one step: a native function that runs the plans of the bodies.

A body is checked like a separate plan, which assumes that the memory of each base is disjoint from that of all others.
The checks here make sure of that: the function calls the kernels of the body's plan at its addresses, and the bases are
operands of the node, or disjoint parts of its scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.check.facts import Facts, Sizes, StepFacts, captured_values
from lathe.core.errors import PlanError
from lathe.core.ir.closure import ClosedBody, close_body
from lathe.core.ir.dim import Dim, affine, product, symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.kernels.call import Block, In, Out, Outer, Scratch
from lathe.core.kernels.call import Operand as Asked
from lathe.core.kernels.control.selected_spec import SelectedSpec
from lathe.core.kernels.control.spec import (
    GOING,
    ITERATION,
    LINE,
    TABLE,
    TRUE,
    Base,
    BranchSpec,
    Carried,
    CarriedValue,
    Operand,
    Own,
    Place,
    RepeatSpec,
    Slice,
    Tape,
)
from lathe.core.ops.control.map_selected import SELECTED
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView
from lathe.core.plan.plan import Address, PlannedGraph, weight_chunks

_FLAGS = (ITERATION, 8), (GOING, 1), (TRUE, 1)  # offsets in scratch memory and sizes in bytes


@dataclass(frozen=True, slots=True)
class Body:
    """A body of a step's node, its plan, and the tape that the step's function runs."""

    step: StepFacts
    closed: ClosedBody
    planned: PlannedGraph
    tape: Tape

    def __str__(self) -> str:
        return f"{self.step}, body {self.closed.graph.name}"

    @property
    def has_own_rows(self) -> bool:
        """Whether `n` in the body is not the batch size, but the number of selected rows (MapSelected)."""
        return isinstance(self.step.call.spec, SelectedSpec)

    @property
    def inputs(self) -> list[Value]:
        """The inputs of the original body, without captured values."""
        return self.closed.graph.inputs[: len(self.closed.graph.inputs) - len(self.closed.outer)]


def bodies_of(facts: Facts) -> Iterator[Body]:
    """Yield every body of all steps that run If, Loop, Scan or MapSelected. PlanError unless each body has one plan."""
    for each in facts.steps:
        spec = each.call.spec
        if isinstance(spec, BranchSpec):
            names = [name for name, value in each.node.attrs.items() if isinstance(value, Graph)]
            tapes = [{"then_branch": spec.then, "else_branch": spec.other}[name] for name in names]
        elif isinstance(spec, RepeatSpec | SelectedSpec):
            tapes = [spec.tape]
        else:
            continue
        planned = facts.planned.bodies.get(facts.planned.calls[each.index][0], ())
        if not len(planned) == len(tapes) == len(each.node.subgraphs):
            raise PlanError(f"{each} has {len(planned)} plans for {len(each.node.subgraphs)} bodies")
        for graph, plan, tape in zip(each.node.subgraphs, planned, tapes, strict=True):
            if isinstance(spec, SelectedSpec):
                graph = graph.clone({str(SELECTED): symbol("n")})
            yield Body(each, close_body(graph, facts.graph.constants), plan, tape)


def check_body(facts: Facts, body: Body) -> None:
    """PlanError unless the tape makes the calls and final copies of the body's plan, at the same addresses.

    The bases of the tape must be those that the node requires (`_expected_bases`), and hold the weights of the plan.
    """
    plan, tape, call = body.planned.plan, body.tape, body.step.call
    given = [(called.symbol, [_place_numbers(place) for place in called.operands]) for called in tape.calls]
    planned = [(step.symbol, [_address_numbers(operand) for operand in step.operands]) for step in plan.steps]
    if given != planned:
        raise PlanError(f"{body}: the tape has other calls than the plan of the body")
    moves = [(_place_numbers(m.source), _place_numbers(m.target), _coefficients(m.nbytes)) for m in tape.moves]
    addresses = [(plan.value_addresses[name], base) for name, base in plan.copies]
    copies = [(_address_numbers(a), (base, (0, 0)), _coefficients(type_.nbytes)) for (a, type_), base in addresses]
    if moves != copies:
        raise PlanError(f"{body}: the tape moves {moves}, the plan of the body {copies}")
    expected = [*_expected_bases(facts, body)]
    arena, weights, *rest = tape.bases
    if len(rest) != len(expected) or not isinstance(arena, Own):
        raise PlanError(f"{body}: {len(rest)} bases after the weights, expected {len(expected)}")
    for index, (base, expected_base) in enumerate(zip(rest, expected, strict=True)):
        if not _is_as_expected(base, expected_base, call.operands):
            raise PlanError(f"{body}: base {index + 2} is {base}, expected {expected_base}")
    data = np.frombuffer(b"".join(weight_chunks(body.planned)), np.uint8)
    block = call.operands[weights.index] if isinstance(weights, Operand) else None
    if data.size and not (isinstance(block, Block) and np.array_equal(block.data, data)):
        raise PlanError(f"{body}: base 1 is {weights}, expected its {data.size} bytes of weights")


def check_frame(facts: Facts, body: Body, sizes: Sizes) -> None:
    """PlanError unless the parts of the step's scratch memory lie in it and are disjoint.

    Slices of rows must lie inside their operands. Checked for the batch size of `sizes`.
    """
    each, spec, plan = body.step, body.step.call.spec, body.planned.plan
    at_least_one = Sizes(spec.block if isinstance(spec, SelectedSpec) else max(sizes.n, 1))
    parts = [(0, LINE), *_FLAGS, (TABLE, 8 * max((len(step.operands) for step in plan.steps), default=0))]
    arena = body.tape.bases[0]
    if isinstance(arena, Own):
        parts.append((at_least_one.dim(arena.offset), plan.arena.at(at_least_one.n)))
    for carried in spec.carried if isinstance(spec, RepeatSpec) else ():
        parts += [(at_least_one.dim(start), sizes.dim(carried.nbytes)) for start in carried.buffers]
    if isinstance(spec, SelectedSpec):
        parts += [(place, 8 * spec.block) for place in (spec.row_indices, spec.element_indices)]
        parts += [(source.rows, source.nbytes * spec.block) for source in spec.sources]
        parts.append((spec.results, spec.width * spec.dtype.itemsize * spec.block))
    parts = sorted(part for part in parts if part[1])
    index = spec.scratch if isinstance(spec, RepeatSpec | BranchSpec | SelectedSpec) else 0
    scratch = each.call.operands[index]
    is_owned = isinstance(scratch, Scratch) and scratch.shared != body.has_own_rows  # or each thread has its own
    limit = at_least_one.dim(scratch.nbytes) if isinstance(scratch, Scratch) and is_owned else 0
    ends = [start + size for start, size in parts]
    if any(end > after[0] for end, after in zip(ends, parts[1:], strict=False)) or ends[-1] > limit:
        raise PlanError(f"{body}: parts of its {limit} bytes of scratch overlap or lie outside: {parts}, n = {sizes.n}")
    for base in body.tape.bases:
        if isinstance(base, Slice):
            _check_slice(each, spec, base, sizes)


def _check_slice(each: StepFacts, spec: object, base: Slice, sizes: Sizes) -> None:
    """PlanError unless `base`, one row of an operand per iteration, has the size of a row, and enough rows exist."""
    value = each.values[base.index]
    shape = sizes.shape(value) if value is not None else None
    if value is None or shape is None or not shape:
        raise PlanError(f"{each} takes slices of operand {base.index}, which is no tensor")
    nbytes, row = value.dtype.itemsize, sizes.dim(base.nbytes)
    for extent in shape:
        nbytes *= extent
    trips = sizes.dim(spec.trips) if isinstance(spec, RepeatSpec) and spec.trips is not None else shape[0]
    if trips > shape[0] or row * shape[0] != nbytes:
        raise PlanError(f"{each} takes {trips} slices of {row} bytes of %{value.name}, which has {nbytes}")


# -- the expected bases of a tape --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ExpectedSlice:
    """An expected base: in iteration i, row i of the operand `whole`, counted from its end if `backward`.

    `row` is the value in the body that has the row.
    """

    whole: Asked
    row: Value
    backward: bool


def _expected_bases(facts: Facts, body: Body) -> Iterator[Base | Asked | _ExpectedSlice]:
    """Yield the bases that the tape must have for the body's inputs, then its captured values, then its outputs.

    A base that is an operand of the node is given as that operand of the kernel call (`In`, `Out` or `Outer`).
    """
    inputs, outputs = _ports(body)
    yield from inputs
    captured = captured_values(body.step.node, facts.graph)
    yield from (Outer(captured.index(value)) for value in body.closed.outer)
    yield from outputs


def _ports(body: Body) -> tuple[list[Base | Asked | _ExpectedSlice], list[Base | Asked | _ExpectedSlice]]:
    """The expected bases of the body's inputs and of its outputs, by the operator: If, MapSelected, Loop or Scan.

    PlanError if types of values outside and inside the body differ.
    """
    node, results = body.step.node, body.closed.graph.outputs
    if node.op == "If":
        _same_types(body, node.outputs, results)
        return [], [Out(index) for index in range(len(node.outputs))]
    if node.op == "MapSelected":
        return _selected_ports(body)
    if node.op == "Loop":
        count = max(len(node.inputs) - 2, 0)
        _check_carried(body, range(2, 2 + count), body.inputs[2:], results[1 : 1 + count])
        rows = [_ExpectedSlice(Out(count + i), value, False) for i, value in enumerate(results[1 + count :])]
        carried, updated = [Carried(i) for i in range(count)], [Carried(i, next=True) for i in range(count)]
        return [Own(ITERATION), Own(TRUE), *carried], [Own(GOING), *updated, *rows]
    view = NodeView(registry.get(node.op), node)
    count = len(node.inputs) - view.attr("num_scan_inputs")
    _check_carried(body, range(count), body.inputs[:count], results[:count])
    back_in, back_out = (view.attr(f"scan_{side}_directions") or () for side in ("input", "output"))
    read = [_ExpectedSlice(In(count + i), v, any(back_in[i : i + 1])) for i, v in enumerate(body.inputs[count:])]
    written = [_ExpectedSlice(Out(count + i), v, any(back_out[i : i + 1])) for i, v in enumerate(results[count:])]
    return (
        [*(Carried(i) for i in range(count)), *read],
        [*(Carried(i, next=True) for i in range(count)), *written],
    )


def _selected_ports(body: Body) -> tuple[list[Base | Asked | _ExpectedSlice], list[Base | Asked | _ExpectedSlice]]:
    """The expected bases of the inputs and outputs of a MapSelected's body, all in the step's scratch memory.

    PlanError unless the kernel spec has the sizes of the node, and one source of rows for each input of the body.
    """
    node, spec, operands = body.step.node, body.step.call.spec, body.step.call.operands
    assert isinstance(spec, SelectedSpec)
    base, mask = node.required_input(0), node.required_input(1)
    view = NodeView(registry.get(node.op), node)
    own = (*mask.shape, product(base.shape[1:]), base.dtype, bool(view.attr("adds")))
    if spec.block < 1:
        raise PlanError(f"{body}: its spec has blocks of {spec.block} rows")
    if (spec.places, spec.rows, spec.width, spec.dtype, spec.adds) != own or operands[:3] != (In(0), In(1), Out(0)):
        raise PlanError(f"{body}: its spec has other sizes or operands than the node, whose mask is {mask.type}")
    given = [(operands[each.operand], each.nbytes, each.is_per_place) for each in spec.sources]
    rows = [_coefficients(value.tensor.nbytes) for value in body.inputs]
    expected = [
        (In(2 + index), nbytes[0] if nbytes else None, bool(is_per_place))
        for index, (nbytes, is_per_place) in enumerate(zip(rows, view.attr("per_place"), strict=True))
    ]
    if given != expected:
        raise PlanError(f"{body} gathers {given}, expected {expected}")
    return [Own(source.rows) for source in spec.sources], [Own(spec.results)]


def _check_carried(body: Body, initial: Sequence[int], before: Sequence[Value], after: Sequence[Value]) -> None:
    """PlanError unless loop-carried values start as node inputs `initial`, end as its first outputs, and keep types.

    `before` and `after` are the body's inputs and outputs for the carried values.
    """
    node, spec, operands = body.step.node, body.step.call.spec, body.step.call.operands
    carried: tuple[CarriedValue, ...] = spec.carried if isinstance(spec, RepeatSpec) else ()
    _same_types(body, [node.inputs[index] for index in initial], before)
    _same_types(body, node.outputs[: len(before)], before)
    _same_types(body, after, before)
    given = [(operands[each.initial], operands[each.final], each.nbytes) for each in carried]
    expected = [(In(index), Out(i), v.tensor.nbytes) for i, (index, v) in enumerate(zip(initial, before, strict=True))]
    if given != expected:
        raise PlanError(f"{body} carries {given}, expected {expected}")


def _same_types(body: Body, ours: Sequence[Value | None], theirs: Sequence[Value]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a is None or a.type != b.type:
            raise PlanError(f"{body}: {a} outside and {b} inside have different types")


def _is_as_expected(base: Base, expected: Base | Asked | _ExpectedSlice, operands: Sequence[Asked]) -> bool:
    if isinstance(expected, _ExpectedSlice):
        if not isinstance(base, Slice) or operands[base.index] != expected.whole or base.backward != expected.backward:
            return False
        return base.nbytes == expected.row.tensor.nbytes
    if isinstance(expected, Outer | Out):
        return isinstance(base, Operand) and operands[base.index] == expected
    return base == expected


def _address_numbers(address: Address) -> tuple[int, tuple[int, int]]:
    """The base, and the coefficients (a, b) of the offset a*n + b."""
    return address.base, (address.offset.a, address.offset.b)


def _place_numbers(place: Place) -> tuple[int, tuple[int, int] | None]:
    return place.base, _coefficients(place.offset)


def _coefficients(dim: Dim) -> tuple[int, int] | None:
    return affine(dim, "n")
