"""QuantizeLinear and DequantizeLinear: real numbers as small integers (or floats) times a scale.

A scale is one number, one per index of an axis, or one per block along an axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.numeric import convert
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import (
    FLOAT,
    Kind,
    agree,
    as_dtype,
    check_kind,
    fits,
    normalize_axis,
    untouched_rows,
)

_STORED = frozenset(
    DType.parse(label)
    for label in (
        "uint2", "int2", "uint4", "int4", "uint8", "int8", "uint16", "int16", "float4e2m1", "float6e2m3", "float6e3m2",
        "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
    )
)  # fmt: skip
QUANTIZED = Kind("a quantized type", _STORED)
_REAL = Kind("a floating-point type or int32", FLOAT.members | {DType.INT32})
_DEQUANTIZABLE = Kind("a quantized type or int32", _STORED | {DType.INT32})
SCALE = Kind("a type of scales", FLOAT.members | {DType.FLOAT8E8M0})


@register
class QuantizeLinear(OpDef):
    """saturate(round(x / y_scale) + y_zero_point), halves to even.

    Results of a float type are not rounded to integers. The division is computed in type `precision`, by default in the
    scale's type, but in that of x for float8e8m0. The result has the zero point's type, otherwise `output_dtype`,
    otherwise uint8.
    """

    agreeing = True
    inputs = "x, y_scale, y_zero_point?"
    outputs = "y"
    attrs = {"axis": 1, "block_size": 0, "output_dtype": 0, "precision": 0, "saturate": 1}
    zero_gradient = "a step function is flat between its steps"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _REAL)
        check_kind(c, 1, SCALE)
        _check_scale(c)
        dtype = as_dtype(c, c.attr("output_dtype")) if c.attr("output_dtype") else None
        if c.has_input(2):
            point = check_kind(c, 2, QUANTIZED)
            if dtype not in (None, point):
                c.fail(f"output_dtype is {dtype}, y_zero_point is {point}")
            dtype = point
        return [TensorType(dtype or DType.UINT8, c.shape(0))]

    def reference(self, c: Call, x: Array, scale: Array, point: Array | None = None) -> Array:
        code, declared = c.attr("precision"), c.attr("output_dtype")
        precision = as_dtype(c, code).numpy if code else scale.dtype
        if precision == DType.FLOAT8E8M0.numpy:
            precision = x.dtype
        ratio = x.astype(precision) / _spread(c, scale, x.shape).astype(precision)
        shift = None if point is None else _spread(c, point, x.shape)
        default = as_dtype(c, declared) if declared else DType.UINT8
        dtype = default if point is None else DType.from_numpy(point.dtype)
        if dtype.is_float:
            shifted = ratio if shift is None else ratio.astype(np.float32) + shift.astype(np.float32)
            return convert(shifted.astype(np.float32), dtype, bool(c.attr("saturate")))
        return saturate(np.rint(ratio.astype(np.float64)), 0 if shift is None else shift.astype(np.int64), dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _scaled_rows(c, axes)


@register
class DequantizeLinear(OpDef):
    """(x - x_zero_point) * x_scale, computed in float32, or in float64 for scales of that type.

    The result has the type `output_dtype`, by default the scale's.
    """

    agreeing = True
    inputs = "x, x_scale, x_zero_point?"
    outputs = "y"
    attrs = {"axis": 1, "block_size": 0, "output_dtype": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, scale = check_kind(c, 0, _DEQUANTIZABLE), check_kind(c, 1, SCALE)
        if c.has_input(2) and c.dtype(2) is not dtype:
            c.fail(f"x is {dtype}, x_zero_point is {c.dtype(2)}, expected one element type")
        _check_scale(c)
        code = c.attr("output_dtype")
        return [TensorType(as_dtype(c, code) if code else scale, c.shape(0))]

    def reference(self, c: Call, x: Array, scale: Array, point: Array | None = None) -> Array:
        wider = np.float32 if DType.from_numpy(x.dtype).is_float else np.int64
        distance = x.astype(wider)
        if point is not None:
            distance = distance - _spread(c, point, x.shape).astype(wider)
        code = c.attr("output_dtype")
        exact = np.float64 if scale.dtype == np.float64 else np.float32
        y = distance.astype(exact) * _spread(c, scale, x.shape).astype(exact)
        return y.astype(as_dtype(c, code).numpy if code else scale.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _scaled_rows(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x, scale, point = g.x(0), g.x(1), g.x_or_none(2)
        if g.attr("block_size"):
            g.unsupported("scales of blocks are not differentiated")
        axis = normalize_axis(g, g.attr("axis"), x.rank) if x.rank else 0
        one = _is_one_number(scale.shape)
        spread = [scale.shape[0] if i == axis and not one else 1 for i in range(x.rank)] if x.rank else []
        distance = x.cast(scale.dtype)
        if point is not None:
            distance = distance - point.cast(scale.dtype).reshape(spread)
        return [(distance * scale.reshape(spread)).cast(g.node.output.dtype)]


def saturate(rounded: Any, point: Any, dtype: DType) -> Array:
    """Integral float64 numbers plus a zero point, clamped to the range of integer type `dtype` and cast; NaN: 0."""
    low, high = integer_range(dtype)
    found = np.clip(np.nan_to_num(rounded, posinf=2.0**40, neginf=-(2.0**40)) + point, low, high)
    return np.where(np.isnan(rounded), 0, found).astype(dtype.numpy)


def integer_range(dtype: DType) -> tuple[int, int]:
    if dtype.label.startswith("int"):
        return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    return 0, (1 << dtype.bits) - 1


def _check_scale(c: Infer) -> None:
    """ModelError unless scale and zero point have one number, or one per index of `axis`.

    For blocks only their rank is checked: it must be the input's.
    """
    if c.attr("block_size") < 0:
        c.fail(f"block_size is {c.attr('block_size')}, expected at least 0")
    for index, name in ((1, "scale"), (2, "zero point")):
        if c.has_input(index):
            _check_spread(c, index, name)


def _check_spread(c: Infer, index: int, name: str) -> None:
    x, values, block = c.shape(0), c.shape(index), c.attr("block_size")
    if x is None or values is None or fits(values, ()) or fits(values, (1,)):
        return
    axis = normalize_axis(c, c.attr("axis"), len(x))
    if block and len(values) != len(x):
        c.fail(f"the {name} is {c.tensor(index)}, expected rank {len(x)} for blocks")
    if not block and len(values) != 1:
        c.fail(f"the {name} is {c.tensor(index)}, expected a number or a vector")
    if not block and not agree(c, values, (x[axis],)):
        c.fail(f"the {name} has {values[0]} elements, axis {axis} of the input {x[axis]}")


def _is_one_number(shape: Sequence[Any]) -> bool:
    return all(dim == 1 for dim in shape) and len(shape) <= 1


def _spread(c: NodeView, values: Any, shape: tuple[int, ...]) -> Any:
    """Scales or zero points, reshaped or repeated so that they broadcast to the input's shape.

    FeedError if blocks do not cover the input.
    """
    if _is_one_number(values.shape):
        return values.reshape(())
    axis = normalize_axis(c, c.attr("axis"), len(shape))
    if c.attr("block_size"):
        repeated = np.repeat(values, c.attr("block_size"), axis)[(*[slice(None)] * axis, slice(shape[axis]))]
        return repeated if repeated.shape == shape else c.fail(f"blocks of shape {values.shape} do not cover {shape}")
    return values.reshape(-1, *(1,) * (len(shape) - axis - 1))


def _scaled_rows(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    x, scale = c.shape(0), c.shape(1)
    if all(axis is None for axis in axes):
        return [None]
    if x is None or scale is None or len(scale) > 1:
        return MixesRows("its scales may differ along the row axis")
    axis = c.attr("axis")
    has_axis = -len(x) <= axis < len(x)  # a vector without a matching axis has one element
    return untouched_rows(c, axes, set() if _is_one_number(scale) or not has_axis else {axis % len(x)})
