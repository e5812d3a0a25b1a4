"""Operators of the ai.onnx.ml domain: features and labels. Trees are in trees.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from core.ir.graph import Array
from core.ir.types import DType, TensorType, ValueType
from core.ops.common import ANY, INDEX, Kind, check_kind, rows_beside
from core.ops.registry import Call, Infer, Mixes, NodeView, OpDef, RowAxis, register

DOMAIN = "ai.onnx.ml"
_NUMBERS = Kind("float32, float64, int32 or int64", frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64}))


@register
class ArrayFeatureExtractor(OpDef):
    """The columns of the last axis that Y names; a vector counts as one row."""

    inputs = "X, Y"
    outputs = "Z"
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = check_kind(c, 0, ANY)
        check_kind(c, 1, INDEX)
        shape, columns = c.shape(0), c.tensor(1)
        if shape is None or columns.shape is None:
            return [TensorType(dtype, None)]
        if not shape:
            c.fail("X has rank 0, expected at least 1")
        return [TensorType(dtype, (*(shape[:-1] or (1,)), columns.size))]

    def reference(self, c: Call, x: Array, y: Array) -> Array:
        if y.size and not 0 <= y.min() <= y.max() < x.shape[-1]:
            c.fail(f"Y names columns {y.min()} to {y.max()}, expected 0 to {x.shape[-1] - 1}")
        return np.atleast_2d(x)[..., y.ravel()]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        rank = c.tensor(0).rank
        return rows_beside(c, axes, {rank - 1})


@register
class Binarizer(OpDef):
    """1 where the input exceeds the threshold, else 0."""

    inputs = "X"
    outputs = "Y"
    attrs = {"threshold": 0.0}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _NUMBERS)
        return [c.tensor(0)]

    def reference(self, c: Call, x: Array) -> Array:
        return (x > c.attr("threshold")).astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        return rows_beside(c, axes, ())


@register
class LabelEncoder(OpDef):
    """Each element looked up in a table of keys and values; what is not in it becomes the default.

    A key that stands twice has its last value, and a NaN key matches every NaN.
    """

    inputs = "X"
    outputs = "Y"
    attrs = {
        "keys_tensor": None,
        "keys_int64s": None,
        "keys_strings": None,
        "keys_floats": None,
        "values_tensor": None,
        "values_int64s": None,
        "values_strings": None,
        "values_floats": None,
        "default_tensor": None,
        "default_int64": -1,
        "default_string": "_Unused",
        "default_float": -0.0,
    }
    domain = DOMAIN
    dtypes: ClassVar[dict[str, DType]] = {"int64": DType.INT64, "string": DType.STRING, "float": DType.FLOAT32}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        keys, values, default = self.table(c)
        if c.dtype(0) is not DType.from_numpy(keys.dtype):
            c.fail(f"X is {c.tensor(0)}, its keys are {DType.from_numpy(keys.dtype)}")
        if keys.shape != values.shape or default.size != 1 or default.dtype != values.dtype:
            c.fail(f"has {keys.size} keys, {values.size} values and {default.size} defaults, expected a value per key")
        return [TensorType(DType.from_numpy(values.dtype), c.shape(0))]

    def table(self, c: NodeView) -> tuple[Array, Array, Array]:
        """Keys, values, and the default."""
        (_, keys), (kind, values) = self._given(c, "keys"), self._given(c, "values")
        default = c.attr(f"default_{kind}")
        if default is None:
            default = self._default(c, values)
        return keys, values, np.asarray(default, values.dtype)

    def _given(self, c: NodeView, side: str) -> tuple[str, Array]:
        if c.attr(f"{side}_tensor") is not None:
            return "tensor", c.attr(f"{side}_tensor")
        for kind, dtype in self.dtypes.items():
            if c.attr(f"{side}_{kind}s") is not None:
                return kind, np.array(c.attr(f"{side}_{kind}s"), dtype.numpy)
        return c.fail(f"has no {side}")

    def _default(self, c: NodeView, values: Array) -> Any:
        """What stands for an absent `default_tensor`."""
        if values.dtype == object:
            return c.attr("default_string")
        return c.attr("default_int64") if values.dtype.kind in "iu" else c.attr("default_float")

    def reference(self, c: Call, x: Array) -> Array:
        keys, values, default = self.table(c)
        table = dict(zip(map(_key, keys.ravel().tolist()), values.ravel().tolist(), strict=True))
        found = [table.get(_key(item), default.item()) for item in x.ravel().tolist()]
        result = np.empty(len(found), values.dtype)
        result[:] = found
        return result.reshape(x.shape)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        return rows_beside(c, axes, ())


def _key(item: Any) -> Any:
    return None if isinstance(item, float) and math.isnan(item) else item
