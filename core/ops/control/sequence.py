"""Sequences and optionals: lists of tensors, and values that may be absent.

In a run, a sequence is a list, an absent optional is None, and a present optional is its content. Elements of a
sequence may differ in shape, so a symbol in their type stands for any extent. It becomes a new symbol when an element
is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, OptionalType, SequenceType, TensorType, ValueType
from lathe.core.ops.control.control_flow import common_type
from lathe.core.ops.opdef.inference import forget_types, infer_graph
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, RuntimeValue, register
from lathe.core.ops.opdef.type_rules import INDEX, Shape, as_dtype, check_kind, normalize_axis


def element_type(c: Infer, index: int) -> ValueType:
    """The type of the elements of input `index`. ModelError unless it is a sequence."""
    value = c.node.input(index)
    if value is None or not isinstance(value.type, SequenceType):
        found = "missing" if value is None else str(value.type)
        c.fail(f"input {index} ({c.op.input_name(index)}) is {found}, expected a sequence")
    return value.type.element


def element_with_fresh_symbols(c: Infer, type_: ValueType, label: str = "d") -> ValueType:
    """The type of an element that is read from a sequence of elements of `type_`: with new symbols for its symbols."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return type_
    return TensorType(type_.dtype, tuple(_fresh_extent(c, dim, f"{label}{i}") for i, dim in enumerate(type_.shape)))


def _fresh_extent(c: Infer, dim: Dim, label: str) -> Dim:
    return dim if isinstance(dim, int) else c.fresh_dim(label)


def _position(c: Call, position: Array, low: int, high: int) -> int:
    """The single element of `position` as a number; FeedError unless there is exactly one, in [low, high]."""
    if position.size != 1:
        c.fail(f"position has {position.size} elements, expected 1")
    index = int(position.item())
    if not low <= index <= high:
        c.fail(f"position is {index}, expected {low} to {high}")
    return index


@register
class SequenceEmpty(OpDef):
    """An empty sequence of tensors of `dtype`."""

    inputs = ""
    outputs = "output"
    attrs = {"dtype": DType.FLOAT32.onnx_code}
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [SequenceType(TensorType(as_dtype(c, c.attr("dtype")), None))]

    def reference(self, c: Call) -> list[RuntimeValue]:
        return []


@register
class SequenceConstruct(OpDef):
    """A sequence with the inputs as its elements."""

    inputs = "first, *inputs"
    outputs = "output_sequence"
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        element: ValueType = c.tensor(0)
        for index in range(1, len(c.node.inputs)):
            element = common_type(c, "element", element, c.tensor(index))
        return [SequenceType(element)]

    def reference(self, c: Call, *elements: Array) -> list[RuntimeValue]:
        return list(elements)


@register
class SequenceAt(OpDef):
    """The element of a sequence at `position`; a negative one counts from the end."""

    inputs = "input_sequence, position"
    outputs = "tensor"
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 1, INDEX)
        return [element_with_fresh_symbols(c, element_type(c, 0))]

    def reference(self, c: Call, elements: list[Array], position: Array) -> Array:
        return elements[_position(c, position, -len(elements), len(elements) - 1)]


@register
class SequenceInsert(OpDef):
    """The sequence with one more element before `position`, or at the end if `position` is absent."""

    inputs = "input_sequence, tensor, position?"
    outputs = "output_sequence"
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if c.has_input(2):
            check_kind(c, 2, INDEX)
        return [SequenceType(common_type(c, "element", element_type(c, 0), c.tensor(1)))]

    def reference(self, c: Call, elements: list[Array], tensor: Array, position: Array | None = None) -> list[Array]:
        size = len(elements)
        at = size if position is None else _position(c, position, -size, size)
        at += size if at < 0 else 0
        return [*elements[:at], tensor, *elements[at:]]


@register
class SequenceErase(OpDef):
    """The sequence without the element at `position` (by default the last)."""

    inputs = "input_sequence, position?"
    outputs = "output_sequence"
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if c.has_input(1):
            check_kind(c, 1, INDEX)
        return [SequenceType(element_type(c, 0))]

    def reference(self, c: Call, elements: list[Array], position: Array | None = None) -> list[Array]:
        last = np.array(-1) if position is None else position
        at = _position(c, last, -len(elements), len(elements) - 1) % len(elements)
        return [*elements[:at], *elements[at + 1 :]]


@register
class SequenceLength(OpDef):
    """The number of elements of a sequence: an int64 scalar."""

    inputs = "input_sequence"
    outputs = "length"
    zero_gradient = "a length does not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        element_type(c, 0)
        return [TensorType(DType.INT64, ())]

    def reference(self, c: Call, elements: list[Array]) -> Array:
        return np.array(len(elements), np.int64)


@register
class SplitToSequence(OpDef):
    """Parts of a tensor along `axis`.

    `split` is a scalar, the extent of every part (the last may be smaller), or a vector of the extents of all parts.
    Without it, every part has extent 1, and loses the axis if `keepdims` is 0.
    """

    inputs = "input, split?"
    outputs = "output_sequence"
    attrs = {"axis": 0, "keepdims": 1}
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        if c.has_input(1):
            check_kind(c, 1, INDEX)
        if type_.shape is None:
            return [SequenceType(type_)]
        axis = normalize_axis(c, c.attr("axis"), len(type_.shape))
        before, after = type_.shape[:axis], type_.shape[axis + 1 :]
        part: Shape = (*before, *self._extent(c, type_.shape[axis]), *after)
        return [SequenceType(TensorType(type_.dtype, part))]

    def _extent(self, c: Infer, whole: Dim) -> tuple[Dim, ...]:
        if not c.has_input(1):
            return (1,) if c.attr("keepdims") else ()
        split = c.value(1)
        if split is not None and split.dtype != object and split.size:
            extents = {int(extent) for extent in split.ravel()}
            uniform = split.ndim == 1 or (isinstance(whole, int) and max(extents) > 0 and whole % max(extents) == 0)
            if uniform and len(extents) == 1:
                return (extents.pop(),)
        return (c.fresh_dim("part"),)

    def reference(self, c: Call, x: Array, split: Array | None = None) -> list[Array]:
        axis = normalize_axis(c, c.attr("axis"), x.ndim)
        extent = x.shape[axis]
        if split is None:
            parts = np.split(x, range(1, extent), axis) if extent else []
            return parts if c.attr("keepdims") else [part.squeeze(axis) for part in parts]
        if split.min(initial=1) < (1 if split.ndim == 0 else 0):
            c.fail(f"split is {split.tolist()}, expected positive extents")
        if split.ndim == 0:
            return np.split(x, range(int(split), extent, int(split)), axis) if extent else []
        if split.sum() != extent:
            c.fail(f"split is {split.tolist()}, expected extents that add up to {extent}")
        return np.split(x, np.cumsum(split)[:-1], axis) if split.size else []


@register
class ConcatFromSequence(OpDef):
    """The elements of a sequence concatenated along `axis`, or with `new_axis` stacked along a new axis there."""

    inputs = "input_sequence"
    outputs = "concat_result"
    attrs = {"axis": Required("integer"), "new_axis": 0}
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        element = element_with_fresh_symbols(c, element_type(c, 0))
        if not isinstance(element, TensorType):
            c.fail(f"its elements are {element}, expected tensors")
        if element.shape is None:
            return [element]
        stacked = bool(c.attr("new_axis"))
        axis = normalize_axis(c, c.attr("axis"), len(element.shape) + stacked)
        after = element.shape[axis if stacked else axis + 1 :]
        return [TensorType(element.dtype, (*element.shape[:axis], c.fresh_dim("joined"), *after))]

    def reference(self, c: Call, elements: list[Array]) -> Array:
        if not elements:
            c.fail("the sequence is empty, expected at least one element")
        return (np.stack if c.attr("new_axis") else np.concatenate)(elements, axis=c.attr("axis"))


@register
class SequenceMap(OpDef):
    """Runs `body` on the elements at each position of all input sequences, which have equal lengths.

    Inputs that are tensors are given to every run. Each output is the sequence of one result of all runs.
    """

    inputs = "input_sequence, *additional_inputs"
    outputs = "*out_sequence"
    attrs = {"body": Required("graph")}
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        body: Graph = c.attr("body")
        element_type(c, 0)
        given = [value.type for value in c.node.inputs if value is not None]
        if len(body.inputs) != len(given) or len(body.outputs) != len(c.node.outputs):
            c.fail(
                f"its body has {len(body.inputs)} inputs and {len(body.outputs)} outputs, "
                f"expected {len(given)} and {len(c.node.outputs)}"
            )
        for index, (value, type_) in enumerate(zip(body.inputs, given, strict=True)):
            value.type = (
                element_with_fresh_symbols(c, type_.element, f"in{index}_")
                if isinstance(type_, SequenceType)
                else type_
            )
        forget_types(body)
        infer_graph(body, dict(c.known))
        return [SequenceType(value.type) for value in body.outputs]

    def reference(self, c: Call, first: list[RuntimeValue], *rest: RuntimeValue) -> tuple[list[RuntimeValue], ...]:
        body: Graph = c.attr("body")
        columns = [first, *(item if isinstance(item, list) else [item] * len(first) for item in rest)]
        lengths = {len(column) for column in columns}
        if len(lengths) > 1:
            c.fail(f"its sequences have {sorted(lengths)} elements, expected equal lengths")
        rows = [c.run_graph(body, row) for row in zip(*columns, strict=True)]
        return tuple([row[i] for row in rows] for i in range(len(body.outputs)))


@register
class Optional(OpDef):
    """The input as an optional; without an input, an absent value of the type `type`."""

    inputs = "input?"
    outputs = "output"
    attrs = {"type": None}
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        value = c.node.input(0)
        content = c.attr("type") if value is None else value.type
        if content is None:
            c.fail("has neither an input nor the attribute 'type', expected one of them")
        return [content if isinstance(content, OptionalType) else OptionalType(content)]

    def reference(self, c: Call, x: RuntimeValue = None) -> RuntimeValue:
        return x


def _content(c: NodeView) -> ValueType:
    value = c.node.input(0)
    if value is None:
        return c.fail("input 0 (input) is missing")
    return value.type.element if isinstance(value.type, OptionalType) else value.type


@register
class OptionalGetElement(OpDef):
    """The content of an optional, FeedError if it is empty; any other value is returned as it is."""

    inputs = "input"
    outputs = "output"
    no_gradient = "sequences and optionals are not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [element_with_fresh_symbols(c, _content(c))]

    def reference(self, c: Call, x: RuntimeValue) -> RuntimeValue:
        return c.fail("the optional is empty") if x is None else x


@register
class OptionalHasElement(OpDef):
    """Whether an optional has a value: a boolean, false without an input."""

    inputs = "input?"
    outputs = "output"
    zero_gradient = "truth values do not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [TensorType(DType.BOOL, ())]

    def reference(self, c: Call, x: Any = None) -> Array:
        return np.array(x is not None)
