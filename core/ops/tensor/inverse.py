"""Inverse of com.microsoft, of square matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import ValueType
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.type_rules import FLOAT, as_computed, check_kind


@register
class Inverse(OpDef):
    """The inverse of each matrix in [..,N,N]. A singular matrix is an error of the run."""

    inputs = "X"
    outputs = "Y"
    domain = "com.microsoft"
    no_gradient = "no gradient is implemented for matrix inversion"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, FLOAT)
        shape = c.shape(0)
        if shape is not None and (len(shape) < 2 or _differ(shape[-2], shape[-1])):
            c.fail(f"X is {c.tensor(0)}, expected square matrices")
        return [c.tensor(0)]

    def reference(self, c: Call, x: Array) -> Array:
        try:
            return np.asarray(np.linalg.inv(as_computed(x))).astype(x.dtype)
        except np.linalg.LinAlgError:
            c.fail("X has a matrix without an inverse, or matrices that are not square")

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if axes[0] is None or (shape is not None and axes[0] < len(shape) - 2):
            return [axes[0]]
        return MixesRows("Inverse mixes the rows and columns of a matrix")


def _differ(a: object, b: object) -> bool:
    """Whether two extents are different numbers."""
    return isinstance(a, int) and isinstance(b, int) and a != b
