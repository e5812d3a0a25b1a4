"""DynamicQuantizeLinear: quantizes a tensor to uint8, with the scale and zero point that cover its numbers and 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import Kind, check_kind
from lathe.core.ops.quantized.quantize import saturate

_FLOAT32 = Kind("float32", frozenset({DType.FLOAT32}))
_MOST = 255


@register
class DynamicQuantizeLinear(OpDef):
    """uint8 numbers, their scale (max(x, 0) - min(x, 0)) / 255, and their zero point round(-min(x, 0) / scale).

    If all numbers are 0, or there are none, the scale is 1 / 255, as in ONNX's reference. ONNX's function body would
    divide by 0.
    """

    inputs = "x"
    outputs = "y, y_scale, y_zero_point"
    zero_gradient = "a step function is flat between its steps"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _FLOAT32)
        return [TensorType(DType.UINT8, c.shape(0)), TensorType(DType.FLOAT32, ()), TensorType(DType.UINT8, ())]

    def reference(self, c: Call, x: Array) -> tuple[Array, ...]:
        low, high = x.min(initial=0), x.max(initial=0)
        span = high - low if high != low else np.float32(1)
        scale = np.asarray(span / np.float32(_MOST), np.float32)
        point = np.asarray(np.rint(-low / scale).clip(0, _MOST), np.uint8)
        return saturate(np.rint((x / scale).astype(np.float64)), int(point), DType.UINT8), scale, point

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return [None] * 3 if axes[0] is None else MixesRows("its scale depends on all rows")

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x = g.x()
        axes = tuple(range(x.rank))
        least = x.op("ReduceMin", axes=axes, keepdims=0) if axes else x
        most = x.op("ReduceMax", axes=axes, keepdims=0) if axes else x
        low, high = least.op("Min", 0.0), most.op("Max", 0.0)
        scale = high.equals(low).where(1.0, high - low) / _MOST
        point = (-low / scale).op("Round").op("Max", 0.0).op("Min", float(_MOST)).cast(DType.UINT8)
        return [x.op("QuantizeLinear", scale, point), scale, point]
