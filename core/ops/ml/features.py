"""Feature operators of ai.onnx.ml: select, scale, normalize, impute and concatenate columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.ml.scores import DOMAIN, FITTED, NUMBERS, as_rows, floats, matrix_rows
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, register
from lathe.core.ops.opdef.type_rules import ANY, INDEX, check_kind, untouched_rows


@register
class ArrayFeatureExtractor(OpDef):
    """X[..., y] for the indices y, which are Y flattened to a vector: entries along the last axis of X.

    A vector X counts as a matrix of one row.
    """

    no_gradient = FITTED
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

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        rank = c.tensor(0).rank
        if axes == [None, 0]:  # exporters look up class labels in this way
            return [max(rank, 2) - 1]  # for each row as many steps as it has indices
        return untouched_rows(c, axes, {rank - 1})


@register
class Binarizer(OpDef):
    """1 where the input exceeds the threshold, otherwise 0."""

    zero_gradient = "it is piecewise constant"
    inputs = "X"
    outputs = "Y"
    attrs = {"threshold": 0.0}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, NUMBERS)
        return [c.tensor(0)]

    def reference(self, c: Call, x: Array) -> Array:
        return (x > c.attr("threshold")).astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, ())


@register
class Scaler(OpDef):
    """(X - offset) * scale as float32; offset and scale have one number per feature (last axis), or one for all."""

    no_gradient = FITTED
    inputs = "X"
    outputs = "Y"
    attrs = {"offset": None, "scale": None}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, NUMBERS)
        shape = c.shape(0)
        for name in ("offset", "scale"):
            size, features = len(c.attr(name) or ()), shape[-1] if shape else 1
            if size > 1 and isinstance(features, int) and size != features:
                c.fail(f"{name} has {size} numbers, expected 1 or the {features} features of X")
        return [TensorType(DType.FLOAT32, shape)]

    def reference(self, c: Call, x: Array) -> Array:
        offset, scale = floats(c.attr("offset") or (0,)), floats(c.attr("scale") or (1,))
        if not {offset.size, scale.size} <= {1, *x.shape[-1:]}:
            c.fail(f"X has shape {list(x.shape)}, its scale is for {max(offset.size, scale.size)} features")
        return ((x.astype(np.float32) - offset) * scale).reshape(x.shape)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _along_features(c, axes)


_NORMS: Mapping[str, Callable[[Array], Array]] = {
    "MAX": lambda x: x.max(axis=-1, keepdims=True, initial=-np.inf),
    "L1": lambda x: np.abs(x).sum(axis=-1, keepdims=True),
    "L2": lambda x: np.sqrt(np.square(x).sum(axis=-1, keepdims=True)),
}


@register
class Normalizer(OpDef):
    """Each row divided by its maximum ("MAX"), or its L1 or L2 norm, as float32; a divisor of zero becomes 1."""

    no_gradient = FITTED
    inputs = "X"
    outputs = "Y"
    attrs = {"norm": "MAX"}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, NUMBERS)
        matrix_rows(c)
        if c.attr("norm") not in _NORMS:
            c.fail(f"norm is {c.attr('norm')!r}, expected one of {', '.join(_NORMS)}")
        return [TensorType(DType.FLOAT32, c.shape(0))]

    def reference(self, c: Call, x: Array) -> Array:
        x = x.astype(np.float32)
        divisor = _NORMS[c.attr("norm")](x)
        return x / np.where(divisor == 0, 1, divisor)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _along_features(c, axes)


@register
class Imputer(OpDef):
    """X with each occurrence of one value, such as NaN, replaced by a number per feature, or one number for all."""

    no_gradient = FITTED
    inputs = "X"
    outputs = "Y"
    attrs = {
        "imputed_value_floats": None,
        "imputed_value_int64s": None,
        "replaced_value_float": 0.0,
        "replaced_value_int64": 0,
    }
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, NUMBERS)
        shape = c.shape(0)
        size, features = len(self.imputed(c, c.dtype(0).is_float)), shape[-1] if shape else 1
        if size != 1 and isinstance(features, int) and size != features:
            c.fail(f"has {size} imputed values, expected 1 or the {features} features of X")
        return [c.tensor(0)]

    def imputed(self, c: NodeView, is_float: bool) -> tuple[Any, ...]:
        name = "imputed_value_floats" if is_float else "imputed_value_int64s"
        return c.attr(name) or c.fail(f"has no {name}")

    def reference(self, c: Call, x: Array) -> Array:
        is_float = x.dtype.kind == "f"
        wanted = c.attr("replaced_value_float" if is_float else "replaced_value_int64")
        found = np.isnan(x) if is_float and math.isnan(wanted) else x == np.array(wanted, x.dtype)
        imputed = np.array(self.imputed(c, is_float), x.dtype)
        if imputed.size not in (1, *x.shape[-1:]):
            c.fail(f"X has shape {list(x.shape)}, its imputed values are for {imputed.size} features")
        return np.where(found, imputed, x)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _along_features(c, axes)


@register
class FeatureVectorizer(OpDef):
    """The inputs [N,C] or [C] (one row) concatenated along C as float32.

    Each input is cut or zero-padded to its number of columns in `inputdimensions`.
    """

    no_gradient = FITTED
    inputs = "*X"
    outputs = "Y"
    attrs = {"inputdimensions": None}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        sizes = c.attr("inputdimensions") or ()
        if not sizes or len(sizes) != len(c.node.inputs) or min(sizes) < 0:
            count = len(c.node.inputs)
            c.fail(f"inputdimensions is {list(sizes)}, expected a size for each of the {count} inputs, at least one")
        shapes = [c.shape(index) for index, _ in enumerate(sizes) if check_kind(c, index, NUMBERS)]
        rows = [shape[0] if len(shape) > 1 else 1 for shape in shapes if shape is not None]
        if not rows:
            return [TensorType(DType.FLOAT32, None)]
        return [TensorType(DType.FLOAT32, (next((n for n in rows if isinstance(n, int)), rows[0]), sum(sizes)))]

    def reference(self, c: Call, *inputs: Array) -> Array:
        parts = [_resize_rows(x, size) for x, size in zip(inputs, c.attr("inputdimensions"), strict=True)]
        if len({len(part) for part in parts}) > 1:
            c.fail(f"its inputs have {[len(part) for part in parts]} rows, expected equal numbers")
        return np.concatenate(parts, axis=1)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        matrices = [c.tensor(index).rank == 2 for index, _ in enumerate(axes)]
        if all(axis == 0 for axis in axes) and all(matrices):
            return [0]
        return (
            [None] if all(axis is None for axis in axes) else MixesRows("not all inputs of FeatureVectorizer have rows")
        )


def _resize_rows(x: Array, size: int) -> Array:
    """The rows cut or zero-padded to `size` features, as float32."""
    rows = as_rows(x).reshape(x.shape[0] if x.ndim > 1 else 1, -1)[:, :size]
    return np.pad(rows, ((0, 0), (0, size - rows.shape[1])))


def _along_features(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`): they may lie along any axis but the last, which holds the features."""
    return untouched_rows(c, axes, {c.tensor(0).rank - 1})
