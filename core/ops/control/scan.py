"""Scan: runs a nested graph once for each slice of its inputs, with carried states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array, Attr, Graph, Value
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.ops.control.control_flow import fixed_point
from lathe.core.ops.opdef.backward import Backward, is_differentiable, nested_gradients
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, register
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.ops.opdef.type_rules import normalize_axis


@register
class Scan(OpDef):
    """Runs `body` once for each slice of the scan inputs.

    The body maps (states, one slice of each scan input) to (states, one slice of each scan output). Outputs: the last
    states, then the scan outputs, with the slices stacked along new axes. The axes are 0 by default. Directions are 0
    (forward, the default) or 1 (backward): the order of reading inputs, and of storing outputs.
    """

    inputs = "*initial_state_and_scan_inputs"
    outputs = "*final_state_and_scan_outputs"
    attrs = {
        "body": Required("graph"), "num_scan_inputs": Required("int"),
        "scan_input_axes": None, "scan_input_directions": None,
        "scan_output_axes": None, "scan_output_directions": None,
    }  # fmt: skip

    def infer(self, c: Infer) -> Sequence[ValueType]:
        body, states = _body(c, len(c.node.inputs))
        scanned = [c.tensor(i) for i in range(states, len(c.node.inputs))]
        slices, length = self._slices(c, scanned)
        carried = fixed_point(c, body, [c.tensor(i) for i in range(states)], after=slices)
        rows = enumerate(body.outputs[states : len(c.node.outputs)])
        return [*carried, *(self._stacked_type(c, value.type, i, length) for i, value in rows)]

    def _slices(self, c: Infer, scanned: Sequence[TensorType]) -> tuple[list[TensorType], Dim]:
        """The types of one slice of each scan input, and the number of slices."""
        slices, length = list[TensorType](), None
        for i, type_ in enumerate(scanned):
            if type_.shape is None:
                slices.append(type_)
                continue
            axis = normalize_axis(c, _number_at(c, "scan_input_axes", i), type_.rank)
            slices.append(TensorType(type_.dtype, type_.shape[:axis] + type_.shape[axis + 1 :]))
            length = type_.shape[axis] if length is None or isinstance(type_.shape[axis], int) else length
        return slices, c.fresh_dim("length") if length is None else length

    def _stacked_type(self, c: Infer, type_: ValueType, index: int, length: Dim) -> TensorType:
        if not isinstance(type_, TensorType):
            return c.fail(f"a scan output is {type_}, expected a tensor")
        if type_.shape is None:
            return type_
        axis = normalize_axis(c, _number_at(c, "scan_output_axes", index), type_.rank + 1)
        return TensorType(type_.dtype, (*type_.shape[:axis], length, *type_.shape[axis:]))

    def reference(self, c: Call, *inputs: Array) -> Any:
        body, states = _body(c, len(inputs))
        scanned = []
        for i, array in enumerate(inputs[states:]):
            slices = np.moveaxis(array, _number_at(c, "scan_input_axes", i), 0)
            scanned.append(slices[::-1] if _number_at(c, "scan_input_directions", i) else slices)
        final, rows = _run_body(c, body, list(inputs[:states]), scanned)
        outputs = []
        for i, slices in enumerate(rows):
            ordered = slices[::-1] if _number_at(c, "scan_output_directions", i) else slices
            outputs.append(np.moveaxis(ordered, 0, _number_at(c, "scan_output_axes", i)))
        return (*final, *outputs)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """A Scan over the recorded states and the same slices, in the opposite order.

        Adds outputs to the node and its body (`Backward.record`).
        """
        body, states = _body(g, len(g.node.inputs))
        for name in ("scan_output_axes", "scan_output_directions"):
            if g.attr(name) is not None:
                g.node.attrs[name] = (*g.attr(name), *(0 for _ in range(states)))
        records = g.record(body, body.inputs[:states])
        return _ScanGradient(g, body, states, records).write()


class _ScanGradient:
    """Emits the gradient of a Scan as another Scan."""

    def __init__(self, g: Backward, body: Graph, states: int, records: Sequence[Term]) -> None:
        self.g, self.body, self.states, self.records = g, body, states, records
        inputs = range(len(g.node.inputs))
        self.real = [i for i in inputs if is_differentiable(g.x(i).value)]  # differentiable states and scan inputs
        self.wanted = g.wanted_captures([body])
        outputs = range(states, len(g.node.outputs) - len(records))
        self.seeded = [i for i in outputs if g.has_dy(i)]  # scan outputs

    def write(self) -> list[Term | None]:
        g, own = self.g, [i for i in self.real if i < self.states]
        slices = [i for i in self.real if i >= self.states]
        initial = [*(g.dy(i) for i in own), *(g.writer.zeros_like(value) for value in self.wanted)]
        scanned = [*self.records, *(g.x(i) for i in range(self.states, len(g.node.inputs)))]
        scanned += [g.dy(i) for i in self.seeded]
        attrs = self._attributes(slices)
        values = [term.value for term in (*initial, *scanned)]
        results = [Term(g.writer, v) for v in g.writer.emit("Scan", values, attrs, len(initial) + len(slices))]
        for value, result in zip(self.wanted, results[len(own) :], strict=False):
            g.capture(value, result.value)
        found = dict(zip([*own, *slices], [*results[: len(own)], *results[len(initial) :]], strict=True))
        return [found.get(i) for i in range(len(g.node.inputs))]

    def _attributes(self, slices: Sequence[int]) -> dict[str, Attr]:
        g, states = self.g, self.states
        inputs = range(len(g.node.inputs) - states)
        read = [(_number_at(g, "scan_input_axes", i), 1 - _number_at(g, "scan_input_directions", i)) for i in inputs]
        seeds = [
            (_number_at(g, "scan_output_axes", i - states), 1 - _number_at(g, "scan_output_directions", i - states))
            for i in self.seeded
        ]
        given = [*((0, 1) for _ in self.records), *read, *seeds]
        written = [read[i - states] for i in slices]
        return {
            "body": self._step(),
            "num_scan_inputs": len(given),
            "scan_input_axes": tuple(axis for axis, _ in given),
            "scan_input_directions": tuple(direction for _, direction in given),
            "scan_output_axes": tuple(axis for axis, _ in written),
            "scan_output_directions": tuple(direction for _, direction in written),
        }

    def _step(self) -> Graph:
        """The body of the Scan that computes the gradient.

        Inputs: gradients of states, sums of gradients of captured values, recorded states, slices, gradients of scan
        outputs. Outputs: gradients of states, the sums, gradients of slices.
        """
        body, states = self.body, self.states
        back = Graph(f"{body.name}_gradient")
        writer = self.g.writer.nested(back)
        entering = {i: writer.input("carried", body.inputs[i].tensor) for i in self.real if i < states}
        before = [writer.input("captured", value.tensor) for value in self.wanted]
        arguments = [writer.input("state_or_slice", value.tensor) for value in body.inputs]
        seeds = {i: writer.input("seed", body.outputs[i].tensor) for i in self.seeded} | entering
        results = writer.inline(body, [term.value for term in arguments])
        given = [seeds[i].value if i in seeds else None for i in range(len(results))]
        targets = [*(arguments[i].value for i in self.real), *self.wanted]
        found = nested_gradients(self.g, writer, results, given, targets)
        back.outputs = self._results(writer, found, before)
        return back

    def _results(self, writer: Writer, found: Sequence[Value], before: Sequence[Term]) -> list[Value]:
        count, own = len(self.real), sum(i < self.states for i in self.real)
        total = [term + writer.term(new) for term, new in zip(before, found[count:], strict=True)]
        return [*found[:own], *(term.value for term in total), *found[own:count]]


def _body(c: NodeView, given: int) -> tuple[Graph, int]:
    """The nested graph and the number of its states. ModelError if it does not fit a node of `given` inputs."""
    body: Graph = c.attr("body")
    states = given - c.attr("num_scan_inputs")
    if states < 0 or states == given or len(body.inputs) != given:
        c.fail(f"has {given} inputs, {c.attr('num_scan_inputs')} of them scanned; its body has {len(body.inputs)}")
    if len(body.outputs) < max(states, len(c.node.outputs)):
        c.fail(f"its body has {len(body.outputs)} outputs, expected {len(c.node.outputs)} and at least {states}")
    return body, states


def _number_at(c: NodeView, name: str, index: int) -> int:
    """Element `index` of the attribute `name`; 0 if the attribute is absent. ModelError if it is too short."""
    values = c.attr(name)
    if values is not None and index >= len(values):
        c.fail(f"{name} has {len(values)} elements, expected one for each scan input or output")
    return int(values[index]) if values is not None else 0


def _run_body(c: Call, body: Graph, states: list[Any], scanned: Sequence[Any]) -> tuple[list[Any], list[Array]]:
    """Run `body` for each slice along axis 0: the final states, and the scan outputs stacked along a new axis 0.

    FeedError if the scan inputs have different numbers of slices.
    """
    if len({len(slices) for slices in scanned}) > 1:
        c.fail(f"scan inputs have {[len(slices) for slices in scanned]} slices, expected one number")
    rows = []
    for step in zip(*scanned, strict=True):
        results = c.run_graph(body, [*states, *step])
        rows.append(results[len(states) :])
        states = results[: len(states)]
    if not rows:
        return states, [_empty_stack(value.tensor) for value in body.outputs[len(states) :]]
    return states, [np.stack(column) for column in zip(*rows, strict=True)]


def _empty_stack(type_: TensorType) -> Array:
    """A stack of no slices of this type: an array of extent 0, with 0 also for symbolic extents."""
    return np.zeros((0, *(dim if isinstance(dim, int) else 0 for dim in type_.shape or ())), type_.dtype.numpy)
