"""Control flow inside native code: If, Loop and Scan become one kernel when everything in their bodies has kernels.

Each body is planned like a graph of its own, with an arena of its own in the node's scratch. What it captures are
operands of the node; its inputs and outputs lie where `core.kernels.catalog.control` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.errors import LatheError
from core.ir.closure import Closed, closed
from core.ir.dim import Dim, symbol
from core.ir.graph import Array, Graph, Node, Value, captures
from core.ir.types import TensorType
from core.kernels.catalog.base import Block, In, KernelCall, Operand, Out, Outer, Request, Scratch
from core.kernels.catalog.control import (
    GOING,
    ITERATION,
    TABLE,
    TRUE,
    Base,
    BranchSpec,
    Called,
    Carried,
    CarriedValue,
    Moved,
    Own,
    Place,
    RepeatSpec,
    Slice,
    Tape,
)
from core.kernels.catalog.control import Operand as Fixed
from core.ops import registry
from core.ops.control import trip_count
from core.plan.liveness import Affine, aligned
from core.plan.plan import Address, Fallback, Plan, Planned, exact_affine, weight_chunks

CONTROL = ("If", "Loop", "Scan")

PlanBody = Callable[[Graph], Planned]


class NotNative(LatheError):
    """Why a node of control flow runs on the reference."""


def control_call(request: Request, plan_body: PlanBody) -> KernelCall:
    """The call that runs the node in native code. NotNative says why there is none."""
    node = request.node
    bodies = [_planned(node, body, request.constants, plan_body) for body in node.subgraphs]
    outer = outer_values(node, request.constants)
    if node.op == "If":
        return _branch(node, bodies, outer)
    if node.op == "Scan":
        return _scan(node, bodies[0], outer)
    trips = trip_count(registry.Infer(registry.get(node.op), node, request.constants))
    return _loop(node, bodies[0], outer, trips or 1)


def outer_values(node: Node, constants: Mapping[Value, Array]) -> list[Value]:
    """What the bodies of a node capture, besides constants."""
    captured = dict.fromkeys(value for body in node.subgraphs for value in captures(body))
    return [value for value in captured if value not in constants]


@dataclass(frozen=True, slots=True)
class _Body:
    """A body and its plan. `inputs` and `outputs` are those of the node's own body, without what it captures."""

    closed: Closed
    planned: Planned

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def inputs(self) -> list[Value]:
        return self.closed.graph.inputs[: len(self.closed.graph.inputs) - len(self.closed.outer)]

    @property
    def outputs(self) -> list[Value]:
        return self.closed.graph.outputs


def _planned(node: Node, body: Graph, constants: Mapping[Value, Array], plan_body: PlanBody) -> _Body:
    alone = closed(body, constants)
    for value in (*alone.graph.inputs, *alone.graph.outputs):
        if _nbytes(value) is None:
            raise NotNative(f"%{value.name} of its body is {value.type}, which only exists while the model runs")
    planned = plan_body(alone.graph)
    missing = next((entry for entry in planned.plan.schedule if isinstance(entry, Fallback)), None)
    if missing is not None:
        raise NotNative(f"in its body, node '{missing.label}' ({missing.op}) runs on the reference: {missing.reason}")
    return _Body(alone, planned)


@dataclass(slots=True)
class _Frame:
    """The operands of a call and its scratch, as they are gathered."""

    outer: Sequence[Value]
    operands: list[Operand] = field(default_factory=list)
    scratch: Affine = field(default_factory=lambda: Affine(b=TABLE))

    def operand(self, operand: Operand) -> int:
        self.operands.append(operand)
        return len(self.operands) - 1

    def room(self, nbytes: Affine) -> Dim:
        """The offset of so many bytes of scratch."""
        start = _dim(self.scratch)
        self.scratch += aligned(nbytes)
        return start

    def table(self, *bodies: _Body) -> None:
        """Room for the operands of the longest call."""
        longest = max((len(step.operands) for body in bodies for step in body.plan.steps), default=0)
        self.room(Affine(b=8 * longest))

    def tape(self, body: _Body, inputs: Sequence[Base], outputs: Sequence[Base], key: str) -> Tape:
        """The body's tape; `inputs` and `outputs` tell where those of the node's own body lie.

        Bases are in a plan's order: arena, weights, inputs (what the body captures comes last), outputs.
        """
        plan = body.plan
        weights = np.frombuffer(b"".join(weight_chunks(body.planned)), np.uint8)
        block: Base = Fixed(self.operand(Block(key, weights))) if weights.size else Own(0)
        outer = [Fixed(self.operand(Outer(self.outer.index(value)))) for value in body.closed.outer]
        calls = (Called(step.symbol, tuple(map(_place, step.operands))) for step in plan.steps)
        moves = (_moved(plan, name, base) for name, base in plan.copies)
        arena = Own(self.room(plan.arena))
        return Tape(tuple(calls), tuple(moves), (arena, block, *inputs, *outer, *outputs))

    def call(self, spec: BranchSpec | RepeatSpec, bodies: Sequence[_Body], flops: Dim) -> KernelCall:
        self.operands[spec.scratch] = Scratch(_dim(self.scratch), shared=True)
        parts = {part.symbol: part for body in bodies for part in body.planned.specs.values()}
        return KernelCall(spec, tuple(self.operands), flops=flops, parts=tuple(parts.values()))


def _branch(node: Node, bodies: Sequence[_Body], outer: Sequence[Value]) -> KernelCall:
    for body in bodies:
        _same_types(node, node.outputs, body.outputs)
    frame = _Frame(outer)
    frame.operand(In(0))
    scratch = frame.operand(Scratch(0))
    outputs = [Fixed(frame.operand(Out(index))) for index in range(len(node.outputs))]
    frame.table(*bodies)
    names = [name for name, value in node.attrs.items() if isinstance(value, Graph)]
    tapes = {name: frame.tape(body, [], outputs, name) for name, body in zip(names, bodies, strict=True)}
    spec = BranchSpec(tapes["then_branch"], tapes["else_branch"], scratch)
    return frame.call(spec, bodies, _flops(max(bodies, key=lambda body: body.plan.flops.at(1))))


def _loop(node: Node, body: _Body, outer: Sequence[Value], trips: Dim) -> KernelCall:
    """`trips` only counts the work."""
    count = max(len(node.inputs) - 2, 0)
    frame = _Frame(outer)
    limit, condition = (None if node.input(i) is None else frame.operand(In(i)) for i in range(2))
    scratch = frame.operand(Scratch(0))
    frame.table(body)
    initial, final = node.inputs[2:], node.outputs[:count]
    carried = _carried(frame, node, body.inputs[2:], body.outputs[1 : 1 + count], range(2, 2 + count))
    _same_types(node, [*initial, *final], [*body.inputs[2:], *body.inputs[2:]])
    rows = [_rows(frame, Out(count + i), value) for i, value in enumerate(body.outputs[1 + count :])]
    inputs: list[Base] = [Own(ITERATION), Own(TRUE), *(Carried(i) for i in range(count))]
    outputs: list[Base] = [Own(GOING), *(Carried(i, next=True) for i in range(count)), *rows]
    tape = frame.tape(body, inputs, outputs, "body")
    spec = RepeatSpec(tape, scratch, None, limit, condition, carried)
    return frame.call(spec, [body], _flops(body) * trips)


def _scan(node: Node, body: _Body, outer: Sequence[Value]) -> KernelCall:
    view = registry.NodeView(registry.get(node.op), node)
    states = len(node.inputs) - view.attr("num_scan_inputs")
    if any(any(view.attr(name) or ()) for name in ("scan_input_axes", "scan_output_axes")):
        raise NotNative("it scans along other axes than the first")
    if len(node.outputs) != len(body.outputs):
        raise NotNative(f"it has {len(node.outputs)} outputs, its body {len(body.outputs)}")
    frame = _Frame(outer)
    scratch = frame.operand(Scratch(0))
    frame.table(body)
    carried = _carried(frame, node, body.inputs[:states], body.outputs[:states], range(states))
    _same_types(node, [*node.inputs[:states], *node.outputs[:states]], body.inputs[:states] * 2)
    back_in, back_out = (view.attr(f"scan_{way}_directions") or () for way in ("input", "output"))
    slices = [_rows(frame, In(states + i), v, back_in[i : i + 1]) for i, v in enumerate(body.inputs[states:])]
    rows = [_rows(frame, Out(states + i), v, back_out[i : i + 1]) for i, v in enumerate(body.outputs[states:])]
    inputs: list[Base] = [*(Carried(i) for i in range(states)), *slices]
    outputs: list[Base] = [*(Carried(i, next=True) for i in range(states)), *rows]
    trips = _length(node, states)
    spec = RepeatSpec(frame.tape(body, inputs, outputs, "body"), scratch, trips, None, None, carried)
    return frame.call(spec, [body], _flops(body) * trips)


def _length(node: Node, states: int) -> Dim:
    """How many slices there are: all scan inputs must be known to have as many."""
    lengths = {value.shape[0] for value in node.inputs[states:] if value is not None}
    if len(lengths) != 1:
        raise NotNative(f"its scan inputs have {', '.join(map(str, lengths))} slices")
    return lengths.pop()


def _carried(
    frame: _Frame, node: Node, before: Sequence[Value], after: Sequence[Value], initial: Sequence[int]
) -> tuple[CarriedValue, ...]:
    _same_types(node, before, after)
    return tuple(
        CarriedValue(frame.operand(In(index)), frame.operand(Out(i)), _size(value), _buffers(frame, value))
        for i, (index, value) in enumerate(zip(initial, before, strict=True))
    )


def _buffers(frame: _Frame, value: Value) -> tuple[Dim, Dim]:
    nbytes = exact_affine(_size(value)) or Affine()
    return frame.room(nbytes), frame.room(nbytes)


def _rows(frame: _Frame, whole: Operand, row: Value, backward: Sequence[int] = ()) -> Slice:
    return Slice(frame.operand(whole), _size(row), any(backward))


def _same_types(node: Node, ours: Sequence[Value | None], theirs: Sequence[Value]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a is not None and a.type != b.type:
            raise NotNative(f"%{a.name} is {a.type} outside and %{b.name} {b.type} inside")


def _nbytes(value: Value) -> Dim | None:
    """The bytes of a tensor of fixed-size elements whose shape is affine in `n`; None for anything else."""
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype.numpy.kind == "O":
        return None
    known = all(exact_affine(dim) is not None for dim in type_.shape) and exact_affine(type_.nbytes) is not None
    return type_.nbytes if known else None


def _size(value: Value) -> Dim:
    return value.tensor.nbytes


def _flops(body: _Body) -> Dim:
    return _dim(body.plan.flops)


def _dim(size: Affine) -> Dim:
    if size.units:
        raise NotNative("control flow has code for one batch size, not for any sizes")
    return size.a * symbol("n") + size.b


def _place(address: Address) -> Place:
    return Place(address.base, _dim(address.offset))


def _moved(plan: Plan, name: str, base: int) -> Moved:
    address, type_ = plan.located[name]
    return Moved(_place(address), Place(base, 0), type_.nbytes)
