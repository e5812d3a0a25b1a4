"""Control flow in native code: an If, Loop, Scan or MapSelected is one kernel unless `control_call` refuses it.

Each body is planned like a separate graph, whose arena is in the scratch memory of the control-flow node. Captured
values are operands of the node. `lathe.core.kernels.control.spec` defines where the body's inputs and outputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lathe.core.errors import LatheError
from lathe.core.ir.closure import ClosedBody, close_body
from lathe.core.ir.dim import Dim, product, symbol
from lathe.core.ir.graph import Array, Graph, Node, Value, captures
from lathe.core.ir.types import TensorType
from lathe.core.kernels.call import Block, In, KernelCall, KernelSpec, Operand, Out, Outer, Request, Scratch
from lathe.core.kernels.control.selected_spec import BLOCK, RowSource, SelectedSpec
from lathe.core.kernels.control.spec import (
    GOING,
    ITERATION,
    TABLE,
    TRUE,
    Base,
    BranchSpec,
    Carried,
    CarriedValue,
    Own,
    Place,
    RepeatSpec,
    Slice,
    Tape,
    TapeCall,
    TapeMove,
)
from lathe.core.kernels.control.spec import Operand as Fixed
from lathe.core.ops.control.control_flow import trip_count
from lathe.core.ops.control.map_selected import SELECTED
from lathe.core.ops.opdef import registry
from lathe.core.plan.liveness import Affine, align_size
from lathe.core.plan.plan import Address, Fallback, Plan, PlannedGraph, exact_affine, weight_chunks

CONTROL = ("If", "Loop", "Scan")
WITH_BODIES = (*CONTROL, "MapSelected")  # operators whose kernel runs the kernels of nested graphs

PlanBody = Callable[[Graph], PlannedGraph]


class NotNativeError(LatheError):
    """A control-flow node has no kernel and runs on its reference; the message says why."""


def control_call(request: Request, plan_body: PlanBody) -> KernelCall:
    """The kernel call of an If, Loop, Scan or MapSelected; `plan_body` plans one of its bodies.

    NotNativeError if a node of the bodies has no kernel, an input or output of a body has an unknown size, types
    outside and inside the bodies differ, or memory depends on the sizes of dynamic-shape code. Also for a Scan along
    another axis than the first or whose inputs are not known to have equal lengths, and as in `_map_selected`.
    """
    node = request.node
    if node.op == "MapSelected":
        return _map_selected(node, request.constants, plan_body)
    bodies = [_plan_body(node, body, request.constants, plan_body) for body in node.subgraphs]
    outer = outer_values(node, request.constants)
    if node.op == "If":
        return _branch(node, bodies, outer)
    if node.op == "Scan":
        return _scan(node, bodies[0], outer)
    trips = trip_count(registry.Infer(registry.get(node.op), node, request.constants))
    return _loop(node, bodies[0], outer, trips or 1)


def outer_values(node: Node, constants: Mapping[Value, Array]) -> list[Value]:
    """The values that the bodies of a node capture and that are not in `constants`, in the order of first use."""
    captured = dict.fromkeys(value for body in node.subgraphs for value in captures(body))
    return [value for value in captured if value not in constants]


@dataclass(frozen=True, slots=True)
class _Body:
    """A body and its plan. `inputs` and `outputs` are those of the original body, without captured values."""

    closed: ClosedBody
    planned: PlannedGraph

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def inputs(self) -> list[Value]:
        return self.closed.graph.inputs[: len(self.closed.graph.inputs) - len(self.closed.outer)]

    @property
    def outputs(self) -> list[Value]:
        return self.closed.graph.outputs


def _plan_body(node: Node, body: Graph, constants: Mapping[Value, Array], plan_body: PlanBody) -> _Body:
    closed_body = close_body(body, constants)
    for value in (*closed_body.graph.inputs, *closed_body.graph.outputs):
        if _nbytes(value) is None:
            raise NotNativeError(f"%{value.name} of its body is {value.type}, whose size only a run shows")
    planned = plan_body(closed_body.graph)
    missing = next((entry for entry in planned.plan.schedule if isinstance(entry, Fallback)), None)
    if missing is not None:
        raise NotNativeError(
            f"in its body, node '{missing.label}' ({missing.op}) runs on the reference: {missing.reason}"
        )
    return _Body(closed_body, planned)


@dataclass(slots=True)
class _Frame:
    """Collects the operands of a kernel call, and the parts of its scratch memory.

    `outer`: the values that the bodies capture. `scratch`: the bytes reserved so far.
    """

    outer: Sequence[Value]
    operands: list[Operand] = field(default_factory=list)
    scratch: Affine = field(default_factory=lambda: Affine(b=TABLE))

    def add_operand(self, operand: Operand) -> int:
        """Add an operand and return its index."""
        self.operands.append(operand)
        return len(self.operands) - 1

    def reserve(self, nbytes: Affine) -> Dim:
        """Reserve bytes of scratch memory, aligned, and return their offset."""
        start = _dim(self.scratch)
        self.scratch += align_size(nbytes)
        return start

    def reserve_bytes(self, nbytes: int) -> int:
        """Reserve a known number of bytes in scratch memory of a known size; return their offset."""
        start = self.scratch.b
        self.reserve(Affine(b=nbytes))
        return start

    def reserve_table(self, *bodies: _Body) -> None:
        """Reserve the table of operand addresses, 8 bytes for each operand of the call with the most operands."""
        longest = max((len(step.operands) for body in bodies for step in body.plan.steps), default=0)
        self.reserve(Affine(b=8 * longest))

    def tape(
        self, body: _Body, inputs: Sequence[Base], outputs: Sequence[Base], key: str, rows: int | None = None
    ) -> Tape:
        """The tape of a body; `inputs` and `outputs` are the bases of the original body's inputs and outputs.

        Bases are in the order of a plan: arena, weights, inputs (captured values last), outputs. The body's arena is
        reserved in the scratch memory, and its weights, if there are any, become an operand `Block` with the key `key`.
        `rows`: the most rows of a body that has an `n` of its own; None if the body has the `n` of the run.
        """
        plan = body.plan
        weights = np.frombuffer(b"".join(weight_chunks(body.planned)), np.uint8)
        block: Base = Fixed(self.add_operand(Block(key, weights))) if weights.size else Own(0)
        outer = [Fixed(self.add_operand(Outer(self.outer.index(value)))) for value in body.closed.outer]
        calls = (TapeCall(step.symbol, tuple(map(_place, step.operands))) for step in plan.steps)
        moves = (_move(plan, name, base) for name, base in plan.copies)
        arena = Own(self.reserve(plan.arena if rows is None else Affine(b=plan.arena.at(rows))))
        return Tape(tuple(calls), tuple(moves), (arena, block, *inputs, *outer, *outputs))

    def call(self, spec: BranchSpec | RepeatSpec, bodies: Sequence[_Body], flops: Dim) -> KernelCall:
        self.operands[spec.scratch] = Scratch(_dim(self.scratch), shared=True)
        return KernelCall(spec, tuple(self.operands), flops=flops, parts=_parts(bodies))


def _parts(bodies: Sequence[_Body]) -> tuple[KernelSpec, ...]:
    """The specs of the kernels in the bodies, each once."""
    return tuple({part.symbol: part for body in bodies for part in body.planned.specs.values()}.values())


def _branch(node: Node, bodies: Sequence[_Body], outer: Sequence[Value]) -> KernelCall:
    for body in bodies:
        _same_types(node, node.outputs, body.outputs)
    frame = _Frame(outer)
    frame.add_operand(In(0))
    scratch = frame.add_operand(Scratch(0))
    outputs = [Fixed(frame.add_operand(Out(index))) for index in range(len(node.outputs))]
    frame.reserve_table(*bodies)
    names = [name for name, value in node.attrs.items() if isinstance(value, Graph)]
    tapes = {name: frame.tape(body, [], outputs, name) for name, body in zip(names, bodies, strict=True)}
    spec = BranchSpec(tapes["then_branch"], tapes["else_branch"], scratch)
    return frame.call(spec, bodies, _flops(max(bodies, key=lambda body: body.plan.flops.at(1))))


def _loop(node: Node, body: _Body, outer: Sequence[Value], trips: Dim) -> KernelCall:
    """The kernel call of a Loop; `trips`, its number of iterations, is only used to estimate its work."""
    count = max(len(node.inputs) - 2, 0)
    frame = _Frame(outer)
    limit, condition = (None if node.input(i) is None else frame.add_operand(In(i)) for i in range(2))
    scratch = frame.add_operand(Scratch(0))
    frame.reserve_table(body)
    initial, final = node.inputs[2:], node.outputs[:count]
    carried = _carried_values(frame, node, body.inputs[2:], body.outputs[1 : 1 + count], range(2, 2 + count))
    _same_types(node, [*initial, *final], [*body.inputs[2:], *body.inputs[2:]])
    rows = [_slice(frame, Out(count + i), value) for i, value in enumerate(body.outputs[1 + count :])]
    inputs: list[Base] = [Own(ITERATION), Own(TRUE), *(Carried(i) for i in range(count))]
    outputs: list[Base] = [Own(GOING), *(Carried(i, next=True) for i in range(count)), *rows]
    tape = frame.tape(body, inputs, outputs, "body")
    spec = RepeatSpec(tape, scratch, None, limit, condition, carried)
    return frame.call(spec, [body], _flops(body) * trips)


def _scan(node: Node, body: _Body, outer: Sequence[Value]) -> KernelCall:
    view = registry.NodeView(registry.get(node.op), node)
    states = len(node.inputs) - view.attr("num_scan_inputs")
    if any(any(view.attr(name) or ()) for name in ("scan_input_axes", "scan_output_axes")):
        raise NotNativeError("it scans along other axes than the first")
    if len(node.outputs) != len(body.outputs):
        raise NotNativeError(f"it has {len(node.outputs)} outputs, its body {len(body.outputs)}")
    frame = _Frame(outer)
    scratch = frame.add_operand(Scratch(0))
    frame.reserve_table(body)
    carried = _carried_values(frame, node, body.inputs[:states], body.outputs[:states], range(states))
    _same_types(node, [*node.inputs[:states], *node.outputs[:states]], body.inputs[:states] * 2)
    back_in, back_out = (view.attr(f"scan_{side}_directions") or () for side in ("input", "output"))
    slices = [_slice(frame, In(states + i), v, back_in[i : i + 1]) for i, v in enumerate(body.inputs[states:])]
    rows = [_slice(frame, Out(states + i), v, back_out[i : i + 1]) for i, v in enumerate(body.outputs[states:])]
    inputs: list[Base] = [*(Carried(i) for i in range(states)), *slices]
    outputs: list[Base] = [*(Carried(i, next=True) for i in range(states)), *rows]
    trips = _scan_length(node, states)
    spec = RepeatSpec(frame.tape(body, inputs, outputs, "body"), scratch, trips, None, None, carried)
    return frame.call(spec, [body], _flops(body) * trips)


def _map_selected(node: Node, constants: Mapping[Value, Array], plan_body: PlanBody) -> KernelCall:
    """The kernel call of a MapSelected, which runs its body for blocks of selected rows.

    In the plan of the body, `n` is the number of rows in a block. NotNativeError also if the number of places, or an
    extent of a captured value or of a row of the base is not a number, or a row of a body's value has an unknown size.
    """
    view = registry.NodeView(registry.get(node.op), node)
    whole: Graph = view.attr("body")
    outer = outer_values(node, constants)
    if any(value.tensor.symbols for value in outer):
        raise NotNativeError("its body reads values whose extents are no numbers")
    base, places = node.required_input(0), node.required_input(1).shape[0]
    width, products_per_row = product(base.shape[1:]), product(base.shape[1:-1])
    if not isinstance(places, int) or not isinstance(width, int) or not isinstance(products_per_row, int):
        raise NotNativeError(f"its base is {base.type}, and its mask has {places} places: expected numbers")
    body = _plan_body(node, whole.clone({str(SELECTED): symbol("n")}), constants, plan_body)
    block = max(1, BLOCK // max(1, products_per_row))  # a row [length, width] has `length` rows of a product
    frame = _Frame(outer, [In(0), In(1), Out(0)])
    frame.reserve_table(body)
    row_indices, element_indices = frame.reserve_bytes(8 * block), frame.reserve_bytes(8 * block)
    sources = []
    for index, (value, is_per_place) in enumerate(zip(body.inputs, view.attr("per_place"), strict=True)):
        nbytes = _row_bytes(value)
        place = frame.reserve_bytes(nbytes * block)
        sources.append(RowSource(frame.add_operand(In(2 + index)), nbytes, place, bool(is_per_place)))
    results = frame.reserve_bytes(_row_bytes(body.outputs[0]) * block)
    tape = frame.tape(body, [Own(source.rows) for source in sources], [Own(results)], "body", block)
    nbytes = frame.scratch.b
    spec = SelectedSpec(
        tape=tape,
        block=block,
        scratch=frame.add_operand(Scratch(nbytes)),
        scratch_bytes=nbytes,
        row_indices=row_indices,
        element_indices=element_indices,
        sources=tuple(sources),
        results=results,
        rows=base.shape[0],
        places=places,
        width=width,
        dtype=base.dtype,
        adds=bool(view.attr("adds")),
    )
    flops = body.plan.flops.a * base.shape[0]
    return KernelCall(spec, tuple(frame.operands), inplace=(0,), flops=flops, parts=_parts([body]))


def _row_bytes(value: Value) -> int:
    """The bytes of a row of a value [n, ...]; NotNativeError unless the value has a known number of bytes times n."""
    size = exact_affine(value.tensor.nbytes)
    if size is None or size.b or size.units:
        raise NotNativeError(f"%{value.name} of its body is {value.type}, expected rows of a known size")
    return size.a


def _scan_length(node: Node, states: int) -> Dim:
    """The extent of all scan inputs along axis 0; NotNativeError unless all have the same (there is at least one).

    `states`: the number of inputs before the scan inputs.
    """
    lengths = {value.shape[0] for value in node.inputs[states:] if value is not None}
    if len(lengths) != 1:
        raise NotNativeError(f"its scan inputs have {', '.join(map(str, lengths))} slices")
    return lengths.pop()


def _carried_values(
    frame: _Frame, node: Node, before: Sequence[Value], after: Sequence[Value], initial: Sequence[int]
) -> tuple[CarriedValue, ...]:
    _same_types(node, before, after)
    return tuple(
        CarriedValue(frame.add_operand(In(index)), frame.add_operand(Out(i)), _size(value), _buffers(frame, value))
        for i, (index, value) in enumerate(zip(initial, before, strict=True))
    )


def _buffers(frame: _Frame, value: Value) -> tuple[Dim, Dim]:
    nbytes = exact_affine(_size(value)) or Affine()
    return frame.reserve(nbytes), frame.reserve(nbytes)


def _slice(frame: _Frame, whole: Operand, row: Value, backward: Sequence[int] = ()) -> Slice:
    return Slice(frame.add_operand(whole), _size(row), any(backward))


def _same_types(node: Node, ours: Sequence[Value | None], theirs: Sequence[Value]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a is not None and a.type != b.type:
            raise NotNativeError(f"%{a.name} is {a.type} outside and %{b.name} {b.type} inside")


def _nbytes(value: Value) -> Dim | None:
    """The bytes of a tensor of fixed-size elements whose shape is affine in `n` (`exact_affine`); None for others."""
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
        raise NotNativeError("control flow has no dynamic-shape code")
    return size.a * symbol("n") + size.b


def _place(address: Address) -> Place:
    return Place(address.base, _dim(address.offset))


def _move(plan: Plan, name: str, base: int) -> TapeMove:
    address, type_ = plan.value_addresses[name]
    return TapeMove(_place(address), Place(base, 0), type_.nbytes)
