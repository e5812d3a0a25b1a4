"""Label operators of ai.onnx.ml: lookup tables and categories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.ml.scores import DOMAIN, NUMBERS
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, register
from lathe.core.ops.opdef.type_rules import Kind, check_kind, untouched_rows

_CATEGORIES = Kind("string or int64", frozenset({DType.STRING, DType.INT64}))
_ENCODED = Kind("string or a number type", NUMBERS.members | {DType.STRING})


@register
class LabelEncoder(OpDef):
    """Replaces each element by the value of its key in a table; elements that are no key become the default.

    The last value of a repeated key wins, and a NaN key matches every NaN.
    """

    zero_gradient = "its input is categorical"
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
        if keys.shape != values.shape or default.size != 1:
            c.fail(f"has {keys.size} keys, {values.size} values and {default.size} defaults, expected a value per key")
        return [TensorType(DType.from_numpy(values.dtype), c.shape(0))]

    def table(self, c: NodeView) -> tuple[Array, Array, Array]:
        """The keys, the values, and the default, as arrays, from the attributes that the node has.

        Of several attributes for the keys or for the values, the first of `_tensor`, `_int64s`, `_strings` and
        `_floats` counts. ModelError if there is none, and for a default that the element type of the values lacks.
        """
        (_, keys), (kind, values) = self._present_attribute(c, "keys"), self._present_attribute(c, "values")
        default = c.attr(f"default_{kind}")
        if isinstance(default, np.ndarray) and default.dtype != values.dtype:
            found, wanted = (DType.from_numpy(each.dtype) for each in (default, values))
            c.fail(f"default_tensor is {found}, expected {wanted} as values_tensor")
        if default is None:
            default = self._default(c, values)
        try:
            return keys, values, np.asarray(default, values.dtype)
        except OverflowError:
            return c.fail(f"default_int64 is {default}, expected a number of {DType.from_numpy(values.dtype)}")

    def _present_attribute(self, c: NodeView, side: str) -> tuple[str, Array]:
        if c.attr(f"{side}_tensor") is not None:
            return "tensor", c.attr(f"{side}_tensor")
        for kind, dtype in self.dtypes.items():
            if c.attr(f"{side}_{kind}s") is not None:
                return kind, np.array(c.attr(f"{side}_{kind}s"), dtype.numpy)
        return c.fail(f"has no {side}")

    def _default(self, c: NodeView, values: Array) -> Any:
        """The default without `default_tensor`: the attribute for the element type of `values`."""
        if values.dtype == object:
            return c.attr("default_string")
        return c.attr("default_int64") if values.dtype.kind in "iu" else c.attr("default_float")

    def reference(self, c: Call, x: Array) -> Array:
        keys, values, default = self.table(c)
        table = dict(zip(map(_key, keys.ravel().tolist()), values.ravel().tolist(), strict=True))
        return _look_up(x, table, default.item(), values.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, ())


def _look_up(x: Array, table: Mapping[Any, Any], default: Any, dtype: np.dtype[Any]) -> Array:
    """The value of each element's key, or the default, in one pass over the elements."""
    found = [table.get(_key(item), default) for item in x.ravel().tolist()]
    result = np.empty(len(found), dtype)
    result[:] = found
    return result.reshape(x.shape)


def _key(item: Any) -> Any:
    return None if isinstance(item, float) and math.isnan(item) else item


@register
class CategoryMapper(OpDef):
    """Maps strings to integers by two parallel lists, or integers to strings; other elements become a default."""

    zero_gradient = "its input is categorical"
    inputs = "X"
    outputs = "Y"
    attrs = {"cats_int64s": None, "cats_strings": None, "default_int64": -1, "default_string": "_Unused"}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = check_kind(c, 0, _CATEGORIES)
        words, numbers = c.attr("cats_strings") or (), c.attr("cats_int64s") or ()
        if not words or len(words) != len(numbers):
            c.fail(f"has {len(words)} cats_strings and {len(numbers)} cats_int64s, expected equal numbers")
        return [TensorType(DType.INT64 if dtype is DType.STRING else DType.STRING, c.shape(0))]

    def reference(self, c: Call, x: Array) -> Array:
        words, numbers = c.attr("cats_strings"), c.attr("cats_int64s")
        if x.dtype == np.int64:
            table, default = dict(zip(numbers, words, strict=True)), c.attr("default_string")
        else:
            table, default = dict(zip(words, numbers, strict=True)), c.attr("default_int64")
        return _look_up(x, table, default, np.dtype(object if x.dtype == np.int64 else np.int64))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, ())


@register
class OneHotEncoder(OpDef):
    """One-hot vectors, float32, along a new last axis; numbers are truncated to int64 and compared as integers.

    An element of no category gives zeros, or FeedError if `zeros` is 0.
    """

    zero_gradient = "its input is categorical"
    inputs = "X"
    outputs = "Y"
    attrs = {"cats_int64s": None, "cats_strings": None, "zeros": 1}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        categories = self.categories(c, check_kind(c, 0, _ENCODED))
        shape = c.shape(0)
        return [TensorType(DType.FLOAT32, None if shape is None else (*shape, len(categories)))]

    def categories(self, c: NodeView, dtype: DType) -> tuple[Any, ...]:
        name = "cats_strings" if dtype is DType.STRING else "cats_int64s"
        return c.attr(name) or c.fail(f"has no {name}, expected the categories of {dtype}")

    def reference(self, c: Call, x: Array) -> Array:
        dtype = DType.from_numpy(x.dtype)
        categories = np.array(self.categories(c, dtype), object if dtype is DType.STRING else np.int64)
        hot = x.astype(categories.dtype)[..., None] == categories
        if not c.attr("zeros") and not hot.any(axis=-1).all():
            c.fail("X has an element of no category, and zeros is 0")
        return hot.astype(np.float32)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, ())
