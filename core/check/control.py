"""If, Loop and Scan as one step: the plans of their bodies, and the native function that walks those.

A body is checked as a plan of its own, whose bases are memory apart from each other. Here is what makes that true: the
function calls the kernels of that plan at its addresses, and its bases lie where the node's operands and the parts of
its scratch memory say, which are disjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from core.check.facts import Facts, Sizes, StepFacts, captured_values
from core.errors import PlanError
from core.ir.closure import Closed, closed
from core.ir.dim import Dim, affine
from core.ir.graph import Graph, Value
from core.kernels.catalog.base import Block, In, Out, Outer, Scratch
from core.kernels.catalog.base import Operand as Asked
from core.kernels.catalog.control import (
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
from core.ops import registry
from core.ops.registry import NodeView
from core.plan.plan import Address, Planned, weight_chunks

_FLAGS = (ITERATION, 8), (GOING, 1), (TRUE, 1)  # where they are, and their bytes


@dataclass(frozen=True, slots=True)
class Body:
    """A body of a step's node, its plan, and the tape that the step's function walks."""

    step: StepFacts
    closed: Closed
    planned: Planned
    tape: Tape

    def __str__(self) -> str:
        return f"{self.step}, body {self.closed.graph.name}"

    @property
    def inputs(self) -> list[Value]:
        """Those of the node's own body, without what it captures."""
        return self.closed.graph.inputs[: len(self.closed.graph.inputs) - len(self.closed.outer)]


def bodies_of(facts: Facts) -> Iterator[Body]:
    """Every body with its tape. PlanError for a step without plans for its bodies."""
    for each in facts.steps:
        spec = each.call.spec
        if isinstance(spec, BranchSpec):
            names = [name for name, value in each.node.attrs.items() if isinstance(value, Graph)]
            tapes = [{"then_branch": spec.then, "else_branch": spec.other}[name] for name in names]
        elif isinstance(spec, RepeatSpec):
            tapes = [spec.tape]
        else:
            continue
        planned = facts.planned.bodies.get(facts.planned.calls[each.index][0], ())
        if not len(planned) == len(tapes) == len(each.node.subgraphs):
            raise PlanError(f"{each} has {len(planned)} plans for {len(each.node.subgraphs)} bodies")
        for graph, plan, tape in zip(each.node.subgraphs, planned, tapes, strict=True):
            yield Body(each, closed(graph, facts.graph.constants), plan, tape)


def check_body(facts: Facts, body: Body) -> None:
    """The tape is that of the body's plan, and its bases are what the node's operands are."""
    plan, tape, call = body.planned.plan, body.tape, body.step.call
    given = [(called.symbol, [_numbers(place) for place in called.operands]) for called in tape.calls]
    planned = [(step.symbol, [_address(operand) for operand in step.operands]) for step in plan.steps]
    if given != planned:
        raise PlanError(f"{body}: the tape has other calls than the plan of the body")
    moves = [(_numbers(move.source), _numbers(move.target), _parts(move.nbytes)) for move in tape.moves]
    copies = [(_address(plan.located[name][0]), (base, (0, 0)), _parts(plan.located[name][1].nbytes))
              for name, base in plan.copies]  # fmt: skip
    if moves != copies:
        raise PlanError(f"{body}: the tape moves {moves}, the plan of the body {copies}")
    expected = [*_expected_bases(facts, body)]
    arena, weights, *rest = tape.bases
    if len(rest) != len(expected) or not isinstance(arena, Own):
        raise PlanError(f"{body}: {len(rest)} bases behind the weights, expected {len(expected)}")
    for index, (base, wanted) in enumerate(zip(rest, expected, strict=True)):
        if not _is(base, wanted, call.operands, body):
            raise PlanError(f"{body}: base {index + 2} is {base}, expected {wanted}")
    data = np.frombuffer(b"".join(weight_chunks(body.planned)), np.uint8)
    block = call.operands[weights.index] if isinstance(weights, Operand) else None
    if data.size and not (isinstance(block, Block) and np.array_equal(block.data, data)):
        raise PlanError(f"{body}: base 1 is {weights}, expected its {data.size} bytes of weights")


def check_frame(facts: Facts, body: Body, sizes: Sizes) -> None:
    """The parts of the function's scratch memory lie apart, inside of it; slices are inside their operands."""
    each, spec, plan = body.step, body.step.call.spec, body.planned.plan
    some = Sizes(max(sizes.n, 1))
    parts = [(0, LINE), *_FLAGS, (TABLE, 8 * max((len(step.operands) for step in plan.steps), default=0))]
    arena = body.tape.bases[0]
    if isinstance(arena, Own):
        parts.append((some.dim(arena.offset), plan.arena.at(some.n)))
    for carried in spec.carried if isinstance(spec, RepeatSpec) else ():
        parts += [(some.dim(start), sizes.dim(carried.nbytes)) for start in carried.buffers]
    parts = sorted(part for part in parts if part[1])
    index = spec.scratch if isinstance(spec, RepeatSpec | BranchSpec) else 0
    scratch = each.call.operands[index]
    room = some.dim(scratch.nbytes) if isinstance(scratch, Scratch) and scratch.shared else 0
    ends = [start + size for start, size in parts]
    if any(end > after[0] for end, after in zip(ends, parts[1:], strict=False)) or ends[-1] > room:
        raise PlanError(f"{body}: parts of its {room} bytes of scratch overlap or lie outside: {parts}, n = {sizes.n}")
    for base in body.tape.bases:
        if isinstance(base, Slice):
            _check_slice(each, spec, base, sizes)


def _check_slice(each: StepFacts, spec: object, base: Slice, sizes: Sizes) -> None:
    """As many rows as there are iterations fill the operand."""
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


# -- what the bases of a tape should be --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sliced:
    """One row in every iteration."""

    whole: Asked
    row: Value
    backward: bool


def _expected_bases(facts: Facts, body: Body) -> Iterator[Base | Asked | _Sliced]:
    """Inputs of the body, then what it captures, then outputs. An operand of the call stands for memory of the node."""
    inputs, outputs = _ports(body)
    yield from inputs
    captured = captured_values(body.step.node, facts.graph)
    yield from (Outer(captured.index(value)) for value in body.closed.outer)
    yield from outputs


def _ports(body: Body) -> tuple[list[Base | Asked | _Sliced], list[Base | Asked | _Sliced]]:
    node, made = body.step.node, body.closed.graph.outputs
    if node.op == "If":
        _same_types(body, node.outputs, made)
        return [], [Out(index) for index in range(len(node.outputs))]
    if node.op == "Loop":
        count = max(len(node.inputs) - 2, 0)
        _check_carried(body, range(2, 2 + count), body.inputs[2:], made[1 : 1 + count])
        rows = [_Sliced(Out(count + i), value, False) for i, value in enumerate(made[1 + count :])]
        carried, later = [Carried(i) for i in range(count)], [Carried(i, next=True) for i in range(count)]
        return [Own(ITERATION), Own(TRUE), *carried], [Own(GOING), *later, *rows]
    view = NodeView(registry.get(node.op), node)
    count = len(node.inputs) - view.attr("num_scan_inputs")
    _check_carried(body, range(count), body.inputs[:count], made[:count])
    back_in, back_out = (view.attr(f"scan_{way}_directions") or () for way in ("input", "output"))
    taken = [_Sliced(In(count + i), v, any(back_in[i : i + 1])) for i, v in enumerate(body.inputs[count:])]
    given = [_Sliced(Out(count + i), v, any(back_out[i : i + 1])) for i, v in enumerate(made[count:])]
    return (
        [*(Carried(i) for i in range(count)), *taken],
        [*(Carried(i, next=True) for i in range(count)), *given],
    )


def _check_carried(body: Body, initial: Sequence[int], before: Sequence[Value], after: Sequence[Value]) -> None:
    """Carried values begin as inputs of the node, end as its first outputs, and keep their types."""
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
            raise PlanError(f"{body}: {a} is outside what {b} is inside")


def _is(base: Base, wanted: Base | Asked | _Sliced, operands: Sequence[Asked], body: Body) -> bool:
    if isinstance(wanted, _Sliced):
        if not isinstance(base, Slice) or operands[base.index] != wanted.whole or base.backward != wanted.backward:
            return False
        return base.nbytes == wanted.row.tensor.nbytes
    if isinstance(wanted, Outer | Out):
        return isinstance(base, Operand) and operands[base.index] == wanted
    return base == wanted


def _address(address: Address) -> tuple[int, tuple[int, int]]:
    return address.base, (address.offset.a, address.offset.b)


def _numbers(place: Place) -> tuple[int, tuple[int, int] | None]:
    return place.base, _parts(place.offset)


def _parts(dim: Dim) -> tuple[int, int] | None:
    return affine(dim, "n")
