"""Products of quantized numbers: exact in integers, and scaled back where the operator asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.ir.graph import Array
from core.ir.types import DType, TensorType, ValueType
from core.ops.common import Kind, Shape, check_kind, expect_shape, fits
from core.ops.conv import convolve, convolved_shape
from core.ops.matmul import product_rows, product_shape
from core.ops.quantize import QUANTIZED, SCALE, saturated
from core.ops.registry import Call, Infer, Mixes, OpDef, RowAxis, register
from core.ops.spatial import WINDOW_ATTRS, batch_rows, to_first, to_layout

_BYTES = Kind("int8 or uint8", frozenset({DType.INT8, DType.UINT8}))


@register
class MatMulInteger(OpDef):
    """(A - a_zero_point) @ (B - b_zero_point) in int32; a zero point may have an element per row of A, column of B."""

    inputs = "A, B, a_zero_point?, b_zero_point?"
    outputs = "Y"
    zero_gradient = "integers have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        for index in (0, 1):
            check_kind(c, index, _BYTES)
        return [TensorType(DType.INT32, product_shape(c, c.shape(0), c.shape(1)))]

    def reference(
        self, c: Call, a: Array, b: Array, a_point: Array | None = None, b_point: Array | None = None
    ) -> Array:
        return np.asarray(np.matmul(_centred(a, _per_row(a_point)), _centred(b, b_point)))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        if any(axis is not None for axis in axes[2:]) or _varies(c, (2, 3)):
            return Mixes("a zero point differs from row to row") if any(a is not None for a in axes) else [None]
        return product_rows(c.shape(0), c.shape(1), axes[:2])


@register
class QLinearMatMul(OpDef):
    """The product of quantized matrices, quantized."""

    inputs = "a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point"
    outputs = "y"
    zero_gradient = "integers have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        _check_operands(c, 0, 3)
        return [TensorType(check_kind(c, 7, QUANTIZED), product_shape(c, c.shape(0), c.shape(3)))]

    def reference(self, c: Call, *x: Array) -> Array:
        a, a_scale, a_point, b, b_scale, b_point, y_scale, y_point = x
        exact = np.matmul(_centred(a, _per_row(a_point)), _centred(b, b_point))
        return _requantized(exact, _per_row(a_scale) * b_scale / _per_row(y_scale), _per_row(y_point))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        rest = (1, 2, 4, 5, 6, 7)
        if any(axes[i] is not None for i in rest) or _varies(c, rest):
            return Mixes("a scale differs from row to row") if any(a is not None for a in axes) else [None]
        return product_rows(c.shape(0), c.shape(3), (axes[0], axes[3]))


@register
class ConvInteger(OpDef):
    """The convolution of x - x_zero_point with w - w_zero_point in int32. What pads x is its zero point."""

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
        kernel = _centred(w, _per_channel(w_point, w.ndim))
        return to_layout(c, convolve(c, to_first(c, _centred(x, x_point)), kernel, None))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        return batch_rows(c, axes)


@register
class QLinearConv(OpDef):
    """The convolution of quantized tensors, quantized. B is int32, its scale x_scale * w_scale."""

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
        exact = convolve(c, to_first(c, _centred(data, x_point)), _centred(w, _per_channel(w_point, rank)), bias)
        scale = x_scale.reshape(()) * _per_channel(w_scale, rank - 1) / y_scale.reshape(())
        return to_layout(c, _requantized(exact, scale, y_point.reshape(())))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        return batch_rows(c, axes)


def _check_per_channel(c: Infer, w: Shape | None, indices: Sequence[int]) -> None:
    """ModelError unless these inputs have one element, or as many as the weight `w` has output channels."""
    for index in indices:
        shape = c.shape(index) if c.has_input(index) else None
        if w is not None and shape is not None and shape != () and not fits(shape, (1,)):
            expect_shape(c, index, w[:1])


def _check_operands(c: Infer, *starts: int) -> None:
    """Data, scale and zero point from each of these inputs on; ModelError unless their types fit."""
    for start in starts:
        dtype = check_kind(c, start, QUANTIZED)
        check_kind(c, start + 1, SCALE)
        if c.dtype(start + 2) is not dtype:
            names = c.op.input_name(start), c.op.input_name(start + 2)
            c.fail(f"{names[0]} is {dtype}, {names[1]} is {c.dtype(start + 2)}, expected one element type")


def _centred(x: Any, point: Any) -> Any:
    """The distance from the zero point, in int32."""
    return x.astype(np.int32) if point is None else x.astype(np.int32) - point.astype(np.int32)


def _per_row(values: Any) -> Any:
    """A vector with an element per row of a matrix, as a column."""
    return values if values is None or values.ndim != 1 or values.size == 1 else values[:, None]


def _per_channel(values: Any, rank: int) -> Any:
    """A vector with an element per output channel, before `rank - 1` further axes."""
    return values if values is None or values.ndim == 0 else values.reshape(-1, *(1,) * (rank - 1))


def _requantized(exact: Any, scale: Any, point: Any) -> Array:
    """int32 numbers times a scale, in float32 as in ONNX Runtime, rounded with halves to even, around a zero point."""
    product = np.rint(exact.astype(np.float32) * scale.astype(np.float32)).astype(np.float64)
    return saturated(product, point.astype(np.int64), DType.from_numpy(point.dtype))


def _varies(c: Infer, indices: Sequence[int]) -> bool:
    """Whether any of these inputs has more than one element, as far as is known."""
    return any(dim != 1 for i in indices if c.has_input(i) for dim in c.shape(i) or ())
