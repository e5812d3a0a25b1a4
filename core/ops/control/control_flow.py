"""Control flow: operators that run nested graphs, which may capture values of the outer graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from lathe.core.errors import ModelError
from lathe.core.ir.dim import Dim, SymDim
from lathe.core.ir.graph import Array, Attr, Graph, Value
from lathe.core.ir.types import DType, OptionalType, SequenceType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, is_differentiable, nested_gradients
from lathe.core.ops.opdef.inference import forget_types, infer_graph
from lathe.core.ops.opdef.registry import Call, Infer, OpDef, Required, RuntimeValue, register
from lathe.core.ops.opdef.terms import Term


def common_type(c: Infer, label: str, a: ValueType, b: ValueType) -> ValueType:
    """The type that describes values of type `a` and of type `b`, such as the results of two branches.

    Different extents become a new symbol, different ranks an unknown shape; a type and an optional become an optional.
    ModelError, with `label`, for different element types or kinds.
    """
    if isinstance(a, OptionalType) or isinstance(b, OptionalType):
        contents = (x.element if isinstance(x, OptionalType) else x for x in (a, b))
        return OptionalType(common_type(c, label, *contents))
    if isinstance(a, SequenceType) and isinstance(b, SequenceType):
        return SequenceType(common_type(c, label, a.element, b.element))
    if not isinstance(a, TensorType) or not isinstance(b, TensorType) or a.dtype != b.dtype:
        if a != b:
            c.fail(f"{label} is {a} on one path and {b} on another")
        return a
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return TensorType(a.dtype, None)
    pairs = enumerate(zip(a.shape, b.shape, strict=True))
    return TensorType(a.dtype, tuple(x if x == y else c.fresh_dim(f"{label}_{i}") for i, (x, y) in pairs))


@register
class If(OpDef):
    """The outputs of graph `then_branch` if `cond`, of one element, is true, otherwise those of `else_branch`.

    The two graphs have no inputs.
    """

    inputs = "cond"
    outputs = "*outputs"
    attrs = {"then_branch": Required("graph"), "else_branch": Required("graph")}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if c.dtype(0) is not DType.BOOL:
            c.fail(f"cond is {c.tensor(0)}, expected bool")
        branches: list[Graph] = [c.attr("then_branch"), c.attr("else_branch")]
        taken = _taken_branch(c)
        possible = _valid_branches(branches if taken is None else [taken], c.known)
        counts = [len(branch.outputs) for branch in branches]
        if set(counts) != {len(c.node.outputs)}:
            c.fail(f"its branches have {counts[0]} and {counts[1]} outputs, expected {len(c.node.outputs)}")
        pairs = zip(possible[0].outputs, possible[-1].outputs, strict=True)
        return [common_type(c, f"output{i}", a.type, b.type) for i, (a, b) in enumerate(pairs)]

    def reference(self, c: Call, cond: Array) -> tuple[RuntimeValue, ...]:
        if cond.size != 1:
            c.fail(f"cond has {cond.size} elements, expected 1")
        return tuple(c.run_graph(c.attr("then_branch" if cond.all() else "else_branch"), []))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """An If whose branches recompute the results and differentiate them."""
        names = ("then_branch", "else_branch")
        wanted = g.wanted_captures([g.attr(name) for name in names])
        branches: dict[str, Attr] = {name: self._backward_step(g, g.attr(name), wanted) for name in names}
        if wanted:
            results = g.writer.emit("If", [g.x().value], branches, len(wanted))
            for value, result in zip(wanted, results, strict=True):
                g.capture(value, result)
        return []

    def _backward_step(self, g: Backward, branch: Graph, wanted: Sequence[Value]) -> Graph:
        back = Graph(f"{branch.name}_gradient")
        writer = g.writer.nested(back)
        results = writer.inline(branch, [])
        back.outputs = nested_gradients(g, writer, results, [g.seed(i) for i in range(len(results))], wanted)
        return back


def _taken_branch(c: Infer) -> Graph | None:
    """The branch that an If takes if its condition is known; otherwise None."""
    condition = c.value(0)
    if condition is None or condition.size != 1 or condition.dtype == object:
        return None
    branch: Graph = c.attr("then_branch" if condition.item() else "else_branch")
    return branch


def _valid_branches(branches: Sequence[Graph], known: Mapping[Value, Array]) -> list[Graph]:
    """Those branches that pass type inference, which also sets their types; `known` are known values around them.

    Exporters leave branches for other ranks or sizes, which are never taken. ModelError, that of the first branch, if
    no branch passes.
    """
    found: list[Graph] = []
    refused: list[ModelError] = []
    for branch in branches:
        try:
            infer_graph(branch, dict(known))
            found.append(branch)
        except ModelError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found


@register
class Loop(OpDef):
    """Runs `body` at most M times (without limit if M is absent) while the condition holds.

    The body maps (iteration number, condition, carried values) to (condition, carried values, scan outputs). `cond`
    decides about the first iteration (true if absent), the body's condition about the next. Outputs: the carried values
    after the loop, then the scan outputs, stacked over the iterations along a new axis 0.
    """

    inputs = "M?, cond?, *v_initial"
    outputs = "*v_final_and_scan_outputs"
    attrs = {"body": Required("graph")}
    open_ended = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        body: Graph = c.attr("body")
        initial = [value.type for value in c.node.inputs[2:] if value is not None]
        if len(body.inputs) != 2 + len(initial) or len(body.outputs) != 1 + len(c.node.outputs):
            c.fail(
                f"its body has {len(body.inputs)} inputs and {len(body.outputs)} outputs, "
                f"expected {2 + len(initial)} and {1 + len(c.node.outputs)}"
            )
        trip_and_condition = [TensorType(DType.INT64, ()), TensorType(DType.BOOL, ())]
        carried = fixed_point(c, body, initial, before=trip_and_condition, skip=1)
        results = [value.type for value in body.outputs[1:]]
        final = [_type_after_loop(a, b) for a, b in zip(carried, results, strict=False)]
        trips = trip_count(c)
        return [*final, *(self._stacked_type(c, type_, trips) for type_ in results[len(carried) :])]

    def _stacked_type(self, c: Infer, type_: ValueType, trips: Dim | None) -> ValueType:
        if not isinstance(type_, TensorType):
            return c.fail(f"a scan output is {type_}, expected a tensor")
        leading = c.fresh_dim("trips") if trips is None else trips
        return TensorType(type_.dtype, None if type_.shape is None else (leading, *type_.shape))

    def reference(self, c: Call, limit: Array | None = None, cond: Array | None = None, *initial: RuntimeValue) -> Any:
        body: Graph = c.attr("body")
        carried, going, scanned = list(initial), cond is None or bool(cond.all()), list[list[Array]]()
        for trip in self._trips(limit):
            if not going:
                break
            results = c.run_graph(body, [np.array(trip), np.array(True), *carried])
            going, carried = bool(np.all(results[0])), results[1 : 1 + len(initial)]
            scanned.append(results[1 + len(initial) :])
        columns = range(1 + len(initial), len(body.outputs))
        return (*carried, *(_stack(body.outputs[at].type, [row[i] for row in scanned]) for i, at in enumerate(columns)))

    def _trips(self, limit: Array | None) -> Iterator[int]:
        return iter(count() if limit is None else range(int(limit.reshape(()))))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """A Loop over the recorded carried values, from the last iteration to the first.

        Adds outputs to the node and its body (`Backward.record`). UnsupportedError if the type of a carried value
        before the loop differs from its type in the body.
        """
        body: Graph = g.attr("body")
        carried = [g.x(2 + i) for i in range(len(g.node.inputs) - 2)]
        for term, entering in zip(carried, body.inputs[2:], strict=True):
            if term.value.type != entering.type:
                g.unsupported(f"a carried value changes its type from {term.value.type} to {entering.type}")
        counts, *records = g.record(body, [body.inputs[0], *body.inputs[2:]])
        real = [i for i, term in enumerate(carried) if is_differentiable(term.value)]
        wanted = g.wanted_captures([body])
        initial = [*(g.dy(i) for i in real), *(g.writer.zeros_like(value) for value in wanted)]
        last = counts.op("Size") - 1
        back = self._backward_step(g, body, last, [counts, *records], real, wanted)
        inputs = [(last + 1).value, None, *(term.value for term in initial)]
        results = [Term(g.writer, v) for v in g.writer.emit("Loop", inputs, {"body": back}, len(initial))]
        for value, captured in zip(wanted, results[len(real) :], strict=True):
            g.capture(value, captured.value)
        found = dict(zip(real, results, strict=False))
        return [None, None, *(found.get(i) for i in range(len(carried)))]

    def _backward_step(
        self,
        g: Backward,
        body: Graph,
        last: Term,
        records: Sequence[Term],
        real: Sequence[int],
        wanted: Sequence[Value],
    ) -> Graph:
        """The body of the Loop that computes the gradient: it takes one iteration of the forward loop back.

        Inputs: iteration number, condition, gradients of carried values, sums of gradients of captured values; outputs:
        the same without the number. `records` are the recorded iteration numbers and carried values, `last` the index
        of the last iteration, `real` the indices of differentiable carried values, `wanted` the captured values.
        """
        back = Graph(f"{body.name}_gradient")
        writer = g.writer.nested(back)
        number = writer.input("back", TensorType(DType.INT64, ()))
        going = writer.input("going", TensorType(DType.BOOL, ()))
        entering = [writer.input("carried", body.inputs[2 + i].tensor) for i in real]
        before = [writer.input("captured", value.tensor) for value in wanted]
        at = writer.term(last.value) - number
        then = [writer.term(record.value).gather(at) for record in records]
        results = writer.inline(body, [then[0].value, going.value, *(term.value for term in then[1:])])
        seeds: list[Value | None] = [None] * len(results)
        for i, term in zip(real, entering, strict=True):
            seeds[1 + i] = term.value
        for i in range(len(records) - 1, len(g.node.outputs)):
            scanned = g.seed(i)
            seeds[1 + i] = None if scanned is None else writer.term(scanned).gather(at).value
        targets = [*(then[1 + i].value for i in real), *wanted]
        found = nested_gradients(g, writer, results, seeds, targets)
        total = [term + writer.term(new) for term, new in zip(before, found[len(real) :], strict=True)]
        back.outputs = [going.op("Identity").value, *found[: len(real)], *(term.value for term in total)]
        return back


def _type_after_loop(carried: ValueType, result: ValueType) -> ValueType:
    """The type of a carried value after the loop: the body's `result` if `carried` is optional, otherwise `carried`."""
    return result if isinstance(carried, OptionalType) else carried


def trip_count(c: Infer) -> Dim | None:
    """The trip count of a Loop if M is known and no condition can end the loop earlier; otherwise None."""
    limit, body = c.value(0), c.attr("body")
    if limit is None or limit.size != 1 or not _always_true(c, c.node.input(1)):
        return None
    last = body.outputs[0]
    while last.producer is not None and last.producer.op == "Identity" and last.producer.inputs[0] is not None:
        last = last.producer.inputs[0]
    if last is not body.inputs[1] and not (last in body.constants and body.constants[last].all()):
        return None
    trips: Dim = limit.reshape(-1)[0]
    return max(int(trips), 0) if not isinstance(trips, SymDim) else trips


def _always_true(c: Infer, condition: Value | None) -> bool:
    """Whether a Loop's initial condition is absent or known to be true."""
    known = None if condition is None else c.known.get(condition)
    return condition is None or (known is not None and known.size == 1 and bool(known.all()))


def fixed_point(
    c: Infer,
    body: Graph,
    initial: Sequence[ValueType],
    before: Sequence[ValueType] = (),
    after: Sequence[ValueType] = (),
    skip: int = 0,
) -> list[ValueType]:
    """Types of the carried values that hold before and after every iteration.

    `initial` are their types before the loop. Each round of inference only widens the types, so that the search ends
    after at most two widenings per axis. `before` and `after` are the types of the body's inputs around the carried
    ones; `skip` is the number of its outputs before them. The types of all values in the body are set. ModelError if
    an iteration changes the element type or kind of a carried value, or if inference of the body fails.
    """
    carried = list(initial)
    while True:
        for value, type_ in zip(body.inputs, [*before, *carried, *after], strict=True):
            value.type = type_
        forget_types(body)
        infer_graph(body, dict(c.known))
        results = [value.type for value in body.outputs[skip : skip + len(carried)]]
        wider = [common_type(c, f"carried{i}", a, b) for i, (a, b) in enumerate(zip(carried, results, strict=True))]
        if wider == carried:
            return carried
        carried = wider


def _stack(type_: ValueType, rows: Sequence[Array]) -> Array:
    if rows:
        return np.stack(rows)
    if not isinstance(type_, TensorType):
        raise TypeError(f"a scan output is {type_}, expected a tensor")
    inner = tuple(dim if isinstance(dim, int) else 0 for dim in type_.shape or ())
    return np.zeros((0, *inner), type_.dtype.numpy)
