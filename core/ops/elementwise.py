"""Arithmetic, element by element, with ONNX (NumPy) broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.ir.graph import Array
from core.ir.types import TensorType, ValueType
from core.ops.common import broadcast_rows, broadcast_shapes, same_dtype
from core.ops.registry import Call, Infer, Mixes, NodeView, OpDef, RowAxis, register
from core.ops.scalar import Operand, ScalarOps


class Elementwise(OpDef):
    """Family base: outputs have the broadcast shape of the inputs and, unless overridden, their element type."""

    def infer(self, c: Infer) -> Sequence[ValueType]:
        count = len(c.node.inputs)
        dtype = same_dtype(c, range(count))
        return [TensorType(dtype, broadcast_shapes(c, [c.shape(i) for i in range(count)]))]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        return broadcast_rows(c, axes)


class Binary(Elementwise):
    """Family base: two inputs `A` and `B`."""

    inputs = "A, B"
    outputs = "C"


@register
class Add(Binary):
    commutative = True
    shape_arithmetic = True

    def reference(self, c: Call, a: Array, b: Array) -> Array:
        return np.add(a, b)

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.add(*x)


@register
class Relu(Elementwise):
    inputs = "X"

    def reference(self, c: Call, x: Array) -> Array:
        return np.maximum(x, x.dtype.type(0))

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        return e.max(x[0], 0)
