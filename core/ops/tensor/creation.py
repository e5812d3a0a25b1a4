"""Operators that create tensors from numbers and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite
from typing import Any

import numpy as np

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.inference import dims_array
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, RuntimeValue, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import INDEX, as_dtype, same_dtype, unknown_shape


@register
class Constant(OpDef):
    """A constant tensor; the importer replaces it with a constant of the graph."""

    inputs = ""
    outputs = "output"
    attrs = dict.fromkeys(
        ("value", "value_float", "value_floats", "value_int", "value_ints", "value_string", "value_strings")
    )
    shape_arithmetic = True
    zero_gradient = "it has no inputs"

    def array(self, c: NodeView) -> Array:
        given = {name: c.attr(name) for name in self.attrs if c.attr(name) is not None}
        if len(given) != 1:
            c.fail(f"has {len(given)} value attributes, expected 1")
        ((name, value),) = given.items()
        dtypes: dict[str, Any] = {"float": np.float32, "int": np.int64, "string": object}
        kind = name.removeprefix("value").strip("_").removesuffix("s")
        return np.asarray(value, dtypes.get(kind))

    def infer(self, c: Infer) -> Sequence[ValueType]:
        array = self.array(c)
        return [TensorType(DType.from_numpy(array.dtype), array.shape)]

    def reference(self, c: Call) -> Array:
        return self.array(c)


@register
class ConstantOfShape(OpDef):
    """A tensor of the given shape that repeats one number, `value` (float32 zero if absent)."""

    inputs = "input"
    outputs = "output"
    attrs = {"value": None}
    params = {"shape": 0}
    symbolic = ("shape",)
    shape_arithmetic = True
    zero_gradient = "it depends on a shape only"

    def fill(self, c: NodeView) -> Array:
        value = c.attr("value")
        return np.zeros(1, np.float32) if value is None else np.asarray(value).reshape(-1)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if self.fill(c).size != 1:
            c.fail(f"value has {self.fill(c).size} elements, expected 1")
        dtype, shape = DType.from_numpy(self.fill(c).dtype), c.param("shape")
        if shape is None:
            return [TensorType(dtype, unknown_shape(c, c.shape(0)))]
        if any(isinstance(dim, int) and dim < 0 for dim in shape):
            c.fail(f"shape is {list(shape)}, expected extents of 0 or more")
        return [TensorType(dtype, shape)]

    def reference(self, c: Call, *_: RuntimeValue) -> Array:
        fill = self.fill(c)
        return np.full(c.param("shape") or (), fill[0], fill.dtype)


def _count(c: NodeView, start: float, limit: float, delta: float) -> int:
    """The number of elements of a Range. ModelError (FeedError in a run) if a bound is infinite or not a number."""
    if not all(map(isfinite, (start, limit, delta))):
        c.fail(f"start, limit and delta are {start}, {limit} and {delta}, expected finite numbers")
    return max(0, ceil((limit - start) / delta))


@register
class Range(OpDef):
    """The numbers start, start + delta, ... before `limit`, as a vector; `delta` may be negative, not 0."""

    inputs = "start, limit, delta"
    outputs = "output"
    attrs = {"stash_type": 1}
    shape_arithmetic = True

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, range(3))
        for index in range(3):
            if any(dim != 1 for dim in c.shape(index) or () if isinstance(dim, int)):
                c.fail(f"{c.op.input_name(index)} is {c.tensor(index)}, expected a scalar")
        values = [c.value(index) for index in range(3)]
        start, limit, delta = (None if value is None else value.ravel().tolist()[0] for value in values)
        return [TensorType(dtype, (self._length(c, start, limit, delta),))]

    def _length(self, c: Infer, start: Any, limit: Any, delta: Any) -> Dim:
        if delta == 0:
            c.fail("delta is 0, expected any other number")
        if delta is None or start is None or limit is None:
            return c.fresh_dim("length")
        if all(isinstance(bound, int | float) for bound in (start, limit, delta)):
            return _count(c, start, limit, delta)
        return limit - start if delta == 1 else c.fresh_dim("length")

    def reference(self, c: Call, start: Array, limit: Array, delta: Array) -> Array:
        first, last, step = (x.reshape(()).item() for x in (start, limit, delta))
        if step == 0:
            c.fail("delta is 0, expected any other number")
        count = _count(c, first, last, step)
        if count >= 1 << 62:  # NumPy makes an empty array of 2**63 - 1 elements or more
            c.fail(f"would have {count} elements")
        return (np.arange(count) * step + first).astype(start.dtype)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """From y[i] = start + i * delta: the sum of dY for `start`, the sum of i * dY[i] for `delta`."""
        steps = g.writer.fill(1, g.dy().dtype, g.dy().shape).op("CumSum", g.writer.array(0), exclusive=1)
        return [g.dy().sum(keepdims=False).reshape(g.x(0).shape), None, (g.dy() * steps).sum(keepdims=False)]


@register
class Iota(OpDef):
    """A tensor of integers: the element at [i, j, ...] is start + steps[0] * i + steps[1] * j + ...

    `start` and `steps` may be symbolic dimensions, like the extents.
    """

    domain = "lathe"
    inputs = ""
    outputs = "output"
    attrs = {"dtype": Required("dtype"), "shape": Required("ints"), "start": 0, "steps": Required("ints")}
    shape_arithmetic = True
    zero_gradient = "it depends on a shape only"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        shape, dtype = tuple(c.attr("shape")), as_dtype(c, c.attr("dtype"))
        if dtype not in INDEX or len(c.attr("steps")) != len(shape):
            c.fail(f"has {len(c.attr('steps'))} steps of {dtype}, expected {len(shape)} of {INDEX.label}")
        return [TensorType(dtype, shape)]

    def known(self, c: Infer) -> Array | None:
        shape, start, steps = tuple(c.attr("shape")), c.attr("start"), c.attr("steps")
        if not all(isinstance(extent, int) for extent in shape):
            return None
        places = np.ndindex(shape)
        dims = (start + sum(step * i for step, i in zip(steps, place, strict=True)) for place in places)
        return dims_array(tuple(dims)).reshape(shape)

    def reference(self, c: Call) -> Array:
        shape, (start,), steps = (c.param(name) or () for name in ("shape", "start", "steps"))
        total = np.full(shape, start, np.int64)
        for step, grid in zip(steps, np.indices(shape, np.int64, sparse=True), strict=True):
            total += step * grid
        return total.astype(as_dtype(c, c.attr("dtype")).numpy)


@register
class EyeLike(OpDef):
    """Ones on diagonal `k` of a matrix with the input's shape."""

    inputs = "input"
    outputs = "output"
    attrs = {"dtype": None, "k": 0}
    zero_gradient = "it depends on a shape only"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        if type_.shape is not None and type_.rank != 2:
            c.fail(f"input is {type_}, expected rank 2")
        dtype = c.attr("dtype")
        return [TensorType(type_.dtype if dtype is None else as_dtype(c, dtype), type_.shape)]

    def reference(self, c: Call, x: Array) -> Array:
        dtype = x.dtype if c.attr("dtype") is None else as_dtype(c, c.attr("dtype")).numpy
        return np.eye(x.shape[0], x.shape[1], k=c.attr("k")).astype(dtype)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        down, across = (g.writer.places(g.x().shape, axis, 2) for axis in (0, 1))
        return [(down + g.attr("k")).equals(across).cast(g.node.output.dtype)]


@register
class Shape_(OpDef):
    """The extents from axis `start` to before axis `end` (by default all), as int64."""

    name = "Shape"
    inputs = "data"
    outputs = "shape"
    attrs = {"start": 0, "end": None}
    shape_arithmetic = True
    zero_gradient = "a shape does not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        shape = c.shape(0)
        count = c.fresh_dim("rank") if shape is None else len(shape[self._part(c)])
        return [TensorType(DType.INT64, (count,))]

    def _part(self, c: NodeView) -> slice:
        return slice(c.attr("start"), c.attr("end"))

    def known(self, c: Infer) -> Array | None:
        shape = c.shape(0)
        return None if shape is None else dims_array(shape[self._part(c)])

    def reference(self, c: Call, x: Array) -> Array:
        return np.array(x.shape[self._part(c)], np.int64)


@register
class Size(OpDef):
    """The number of elements as int64."""

    inputs = "data"
    outputs = "size"
    shape_arithmetic = True
    zero_gradient = "a size does not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [TensorType(DType.INT64, ())]

    def known(self, c: Infer) -> Array | None:
        return None if c.shape(0) is None else dims_array((c.tensor(0).size,)).reshape(())

    def reference(self, c: Call, x: Array) -> Array:
        return np.array(x.size, np.int64)
