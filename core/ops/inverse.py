"""Inverse of com.microsoft, of square matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.ir.graph import Array
from core.ir.types import ValueType
from core.ops.common import FLOAT, check_kind, wide
from core.ops.registry import Call, Infer, Mixes, OpDef, RowAxis, register


@register
class Inverse(OpDef):
    """The inverse of each matrix of [..,N,N]. A run with a matrix that has none is refused."""

    inputs = "X"
    outputs = "Y"
    domain = "com.microsoft"
    no_gradient = "it is not an operator that ONNX trains with"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, FLOAT)
        shape = c.shape(0)
        if shape is not None and (len(shape) < 2 or _differ(shape[-2], shape[-1])):
            c.fail(f"X is {c.tensor(0)}, expected square matrices")
        return [c.tensor(0)]

    def reference(self, c: Call, x: Array) -> Array:
        try:
            return np.asarray(np.linalg.inv(wide(x))).astype(x.dtype)
        except np.linalg.LinAlgError:
            c.fail("X has a matrix without an inverse, or matrices that are not square")

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        shape = c.shape(0)
        if axes[0] is None or (shape is not None and axes[0] < len(shape) - 2):
            return [axes[0]]
        return Mixes("Inverse mixes the rows and columns of a matrix")


def _differ(a: object, b: object) -> bool:
    """Whether two extents are known numbers that differ."""
    return isinstance(a, int) and isinstance(b, int) and a != b
