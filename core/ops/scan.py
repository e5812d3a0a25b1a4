"""Scan: a nested graph run once for each slice of its inputs, carrying state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.ir.dim import Dim
from core.ir.graph import Array, Graph
from core.ir.types import TensorType, ValueType
from core.ops.common import normalize_axis
from core.ops.control import fixed_point
from core.ops.registry import Call, Infer, NodeView, OpDef, Required, register

_SCAN_ATTRS = {"body": Required("graph"), "num_scan_inputs": Required("int")}


@register
class Scan(OpDef):
    """Maps (states, one slice of every scan input) to (states, one slice of every scan output), slice after slice.

    Directions are 0 (forward) or 1 (backward), for inputs the order of reading, for outputs that of storing.
    """

    inputs = "*initial_state_and_scan_inputs"
    outputs = "*final_state_and_scan_outputs"
    attrs = {
        **_SCAN_ATTRS, "scan_input_axes": None, "scan_input_directions": None, "scan_output_axes": None,
        "scan_output_directions": None,
    }  # fmt: skip

    def infer(self, c: Infer) -> Sequence[ValueType]:
        body, states = _body(c, len(c.node.inputs))
        scanned = [c.tensor(i) for i in range(states, len(c.node.inputs))]
        slices, length = self._slices(c, scanned)
        carried = fixed_point(c, body, [c.tensor(i) for i in range(states)], after=slices)
        rows = enumerate(body.outputs[states : len(c.node.outputs)])
        return [*carried, *(self._stacked(c, value.type, i, length) for i, value in rows)]

    def _slices(self, c: Infer, scanned: Sequence[TensorType]) -> tuple[list[TensorType], Dim]:
        """The types of one slice of each scan input, and how many there are."""
        slices, length = list[TensorType](), None
        for i, type_ in enumerate(scanned):
            if type_.shape is None:
                slices.append(type_)
                continue
            axis = normalize_axis(c, _each(c, "scan_input_axes", i), type_.rank)
            slices.append(TensorType(type_.dtype, type_.shape[:axis] + type_.shape[axis + 1 :]))
            length = type_.shape[axis] if length is None or isinstance(type_.shape[axis], int) else length
        return slices, c.fresh_dim("length") if length is None else length

    def _stacked(self, c: Infer, type_: ValueType, index: int, length: Dim) -> TensorType:
        if not isinstance(type_, TensorType):
            return c.fail(f"a scan output is {type_}, expected a tensor")
        if type_.shape is None:
            return type_
        axis = normalize_axis(c, _each(c, "scan_output_axes", index), type_.rank + 1)
        return TensorType(type_.dtype, (*type_.shape[:axis], length, *type_.shape[axis:]))

    def reference(self, c: Call, *inputs: Array) -> Any:
        body, states = _body(c, len(inputs))
        scanned = []
        for i, array in enumerate(inputs[states:]):
            slices = np.moveaxis(array, _each(c, "scan_input_axes", i), 0)
            scanned.append(slices[::-1] if _each(c, "scan_input_directions", i) else slices)
        final, rows = _run(c, body, list(inputs[:states]), scanned)
        outputs = []
        for i, slices in enumerate(rows):
            ordered = slices[::-1] if _each(c, "scan_output_directions", i) else slices
            outputs.append(np.moveaxis(ordered, 0, _each(c, "scan_output_axes", i)))
        return (*final, *outputs)


@register
class BatchedScan(OpDef):
    """Scan as opset 8 had it: axis 0 of everything is a batch, axis 1 the steps, of which each item may have fewer.

    What an item's scan outputs lack in steps is zero.
    """

    domain = "lathe"
    inputs = "sequence_lens?, *initial_state_and_scan_inputs"
    outputs = "*final_state_and_scan_outputs"
    attrs = {**_SCAN_ATTRS, "directions": None}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        body, states = _body(c, len(c.node.inputs) - 1)
        tensors = [c.tensor(i) for i in range(1, len(c.node.inputs))]
        batch, length = _leading(c, tensors[states])
        inner = [TensorType(t.dtype, None if t.shape is None else t.shape[1 + (i >= states) :])
                 for i, t in enumerate(tensors)]  # fmt: skip
        carried = fixed_point(c, body, inner[:states], after=inner[states:])
        final = [_under(c, type_, (batch,)) for type_ in carried]
        return [*final, *(_under(c, value.type, (batch, length)) for value in body.outputs[states:])]

    def reference(self, c: Call, lengths: Array | None, *inputs: Array) -> Any:
        body, states = _body(c, len(inputs))
        batch, longest = inputs[states].shape[:2]
        items = []
        for item in range(batch):
            count = longest if lengths is None else int(lengths[item])
            scanned = [array[item, :count] for array in inputs[states:]]
            scanned = [x[::-1] if _each(c, "directions", i) else x for i, x in enumerate(scanned)]
            final, rows = _run(c, body, [array[item] for array in inputs[:states]], scanned)
            items.append([*final, *(_padded(x, longest) for x in rows)])
        return tuple(np.stack(column) for column in zip(*items, strict=True))


def _body(c: NodeView, given: int) -> tuple[Graph, int]:
    """The nested graph and the number of its states; ModelError when it does not fit `given` inputs."""
    body: Graph = c.attr("body")
    states = given - c.attr("num_scan_inputs")
    if states < 0 or states == given or len(body.inputs) != given:
        c.fail(f"has {given} inputs, {c.attr('num_scan_inputs')} of them scanned; its body has {len(body.inputs)}")
    if len(body.outputs) < max(states, len(c.node.outputs)):
        c.fail(f"its body has {len(body.outputs)} outputs, expected {len(c.node.outputs)} and at least {states}")
    return body, states


def _each(c: NodeView, name: str, index: int) -> int:
    """The index-th number of an attribute whose absence means zeros."""
    values = c.attr(name)
    if values is not None and index >= len(values):
        c.fail(f"{name} has {len(values)} elements, expected one for each input or output that is scanned")
    return int(values[index]) if values is not None else 0


def _run(c: Call, body: Graph, states: list[Any], scanned: Sequence[Any]) -> tuple[list[Any], list[Array]]:
    """Final states, and scan outputs stacked along a new first axis."""
    if len({len(slices) for slices in scanned}) > 1:
        c.fail(f"scan inputs have {[len(slices) for slices in scanned]} slices, expected one number")
    rows = []
    for step in zip(*scanned, strict=True):
        results = c.run_graph(body, [*states, *step])
        rows.append(results[len(states) :])
        states = results[: len(states)]
    if not rows:
        return states, [_none(value.tensor) for value in body.outputs[len(states) :]]
    return states, [np.stack(column) for column in zip(*rows, strict=True)]


def _none(type_: TensorType) -> Array:
    """No slices of this type."""
    return np.zeros((0, *(dim if isinstance(dim, int) else 0 for dim in type_.shape or ())), type_.dtype.numpy)


def _padded(rows: Array, length: int) -> Array:
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def _leading(c: Infer, type_: TensorType) -> tuple[Dim, Dim]:
    return (c.fresh_dim("batch"), c.fresh_dim("length")) if type_.shape is None else (type_.shape[0], type_.shape[1])


def _under(c: Infer, type_: ValueType, dims: tuple[Dim, ...]) -> TensorType:
    if not isinstance(type_, TensorType):
        return c.fail(f"an output of its body is {type_}, expected a tensor")
    return TensorType(type_.dtype, None if type_.shape is None else (*dims, *type_.shape))
