"""Products of quantized numbers: exact integer sums, requantized by the QLinear operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.nn.conv import convolve, convolved_shape
from lathe.core.ops.nn.matmul import product_rows, product_shape
from lathe.core.ops.nn.spatial import WINDOW_ATTRS, batch_rows, to_first, to_layout
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.type_rules import Kind, Shape, check_kind, expect_shape, fits
from lathe.core.ops.quantized.quantize import QUANTIZED, SCALE, saturate

_BYTES = Kind("int8 or uint8", frozenset({DType.INT8, DType.UINT8}))


@register
class MatMulInteger(OpDef):
    """(A - a_zero_point) @ (B - b_zero_point) in int32. Zero points: one number, or one per row of A or column of B."""

    inputs = "A, B, a_zero_point?, b_zero_point?"
    outputs = "Y"
    agreeing = True
    zero_gradient = "integers have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        for index in (0, 1):
            check_kind(c, index, _BYTES)
        _check_per_line(c, c.shape(0), -2, (2,))
        _check_per_line(c, c.shape(1), -1, (3,))
        return [TensorType(DType.INT32, product_shape(c, c.shape(0), c.shape(1)))]

    def reference(
        self, c: Call, a: Array, b: Array, a_point: Array | None = None, b_point: Array | None = None
    ) -> Array:
        return np.asarray(np.matmul(_shifted(a, _per_row(a_point)), _shifted(b, b_point)))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if any(axis is not None for axis in axes[2:]) or _may_vary(c, (2, 3)):
            return MixesRows("a zero point differs from row to row") if any(a is not None for a in axes) else [None]
        return product_rows(c.shape(0), c.shape(1), axes[:2])


@register
class QLinearMatMul(OpDef):
    """The exact integer product of quantized matrices, times a_scale * b_scale / y_scale, plus y_zero_point."""

    inputs = "a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point"
    outputs = "y"
    agreeing = True
    zero_gradient = "integers have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        _check_operands(c, 0, 3)
        _check_per_line(c, c.shape(0), -2, (1, 2))
        _check_per_line(c, c.shape(3), -1, (4, 5))
        return [TensorType(check_kind(c, 7, QUANTIZED), product_shape(c, c.shape(0), c.shape(3)))]

    def reference(self, c: Call, *x: Array) -> Array:
        a, a_scale, a_point, b, b_scale, b_point, y_scale, y_point = x
        exact = np.matmul(_shifted(a, _per_row(a_point)), _shifted(b, b_point))
        return _requantize(exact, _per_row(a_scale) * b_scale / _per_row(y_scale), _per_row(y_point))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        rest = (1, 2, 4, 5, 6, 7)
        if any(axes[i] is not None for i in rest) or _may_vary(c, rest):
            return MixesRows("a scale differs from row to row") if any(a is not None for a in axes) else [None]
        return product_rows(c.shape(0), c.shape(3), (axes[0], axes[3]))


@register
class ConvInteger(OpDef):
    """The convolution of x - x_zero_point with w - w_zero_point in int32. x is padded with its zero point."""

    agreeing = True
    inputs = "x, w, x_zero_point?, w_zero_point?"
    outputs = "y"
    attrs = {**WINDOW_ATTRS, "group": 1, "layout": "NCHW"}
    zero_gradient = "integers have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        for index in (0, 1):
            check_kind(c, index, _BYTES)
        _check_per_channel(c, c.shape(1), (3,))
        return [TensorType(DType.INT32, convolved_shape(c, c.shape(0), c.shape(1)))]

    def reference(
        self, c: Call, x: Array, w: Array, x_point: Array | None = None, w_point: Array | None = None
    ) -> Array:
        kernel = _shifted(w, _per_channel(w_point, w.ndim))
        return to_layout(c, convolve(c, to_first(c, _shifted(x, x_point)), kernel, None))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)


@register
class QLinearConv(OpDef):
    """The exact integer convolution of quantized x and w plus B, times x_scale * w_scale / y_scale, plus y_zero_point.

    B is int32 in units of x_scale * w_scale; the scale and zero point of w may be per output channel.
    """

    agreeing = True
    inputs = "x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B?"
    outputs = "y"
    attrs = {**WINDOW_ATTRS, "group": 1, "layout": "NCHW"}
    zero_gradient = "integers have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        _check_operands(c, 0, 3)
        w = c.shape(3)
        _check_per_channel(c, w, (4, 5))
        if w is not None:
            expect_shape(c, 8, w[:1])
        return [TensorType(check_kind(c, 7, QUANTIZED), convolved_shape(c, c.shape(0), w))]

    def reference(self, c: Call, *x: Array) -> Array:
        data, x_scale, x_point, w, w_scale, w_point, y_scale, y_point = x[:8]
        bias = x[8] if len(x) > 8 else None
        rank = w.ndim
        exact = convolve(c, to_first(c, _shifted(data, x_point)), _shifted(w, _per_channel(w_point, rank)), bias)
        scale = x_scale.reshape(()) * _per_channel(w_scale, rank - 1) / y_scale.reshape(())
        return to_layout(c, _requantize(exact, scale, y_point.reshape(())))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)


def _check_per_channel(c: Infer, w: Shape | None, indices: Sequence[int]) -> None:
    """ModelError unless each of these inputs has one element, or one per output channel of the weight `w`."""
    for index in indices:
        shape = c.shape(index) if c.has_input(index) else None
        if w is not None and shape is not None and shape != () and not fits(shape, (1,)):
            expect_shape(c, index, w[:1])


def _check_per_line(c: Infer, matrix: Shape | None, axis: int, indices: Sequence[int]) -> None:
    """ModelError for a vector among these inputs that has neither one element nor one for each row or column.

    `axis` of `matrix` is -2 for rows, -1 for columns.
    """
    for index in indices:
        shape = c.shape(index) if c.has_input(index) else None
        if matrix is not None and len(matrix) > 1 and shape is not None and len(shape) == 1 and not fits(shape, (1,)):
            expect_shape(c, index, (matrix[axis],))


def _check_operands(c: Infer, *starts: int) -> None:
    """ModelError unless the types of the data, scale and zero point that start at each of these inputs fit."""
    for start in starts:
        dtype = check_kind(c, start, QUANTIZED)
        check_kind(c, start + 1, SCALE)
        if c.dtype(start + 2) is not dtype:
            names = c.op.input_name(start), c.op.input_name(start + 2)
            c.fail(f"{names[0]} is {dtype}, {names[1]} is {c.dtype(start + 2)}, expected one element type")


def _shifted(x: Any, point: Any) -> Any:
    """The difference of `x` from the zero point (None: 0), in int32."""
    return x.astype(np.int32) if point is None else x.astype(np.int32) - point.astype(np.int32)


def _per_row(values: Any) -> Any:
    """A vector with an element per row of a matrix, as a column; None and single numbers are returned as they are."""
    return values if values is None or values.ndim != 1 or values.size == 1 else values[:, None]


def _per_channel(values: Any, rank: int) -> Any:
    """A vector with an element per output channel, with `rank - 1` axes of extent 1 after it; None stays None."""
    return values if values is None or values.ndim == 0 else values.reshape(-1, *(1,) * (rank - 1))


def _requantize(exact: Any, scale: Any, point: Any) -> Array:
    """int32 numbers times a scale in float32 (as in ONNX Runtime), rounded half to even, plus a zero point.

    The result has the zero point's type and is clamped to its range.
    """
    product = np.rint(exact.astype(np.float32) * scale.astype(np.float32)).astype(np.float64)
    return saturate(product, point.astype(np.int64), DType.from_numpy(point.dtype))


def _may_vary(c: Infer, indices: Sequence[int]) -> bool:
    """Whether any of these inputs may have more than one element."""
    return any(dim != 1 for i in indices if c.has_input(i) for dim in c.shape(i) or ())
