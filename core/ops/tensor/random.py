"""Random numbers. The same `seed` gives the same numbers each time; without one they differ from run to run.

They come from `numpy.random.RandomState`, whose streams NumPy keeps the same in every release.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import FLOAT, as_computed, as_dtype, check_kind

_SEED = {"seed": None}


def generator(c: NodeView) -> np.random.RandomState:
    """A new random number generator, seeded with the node's `seed`, or from the system if that is absent.

    The seed is truncated to an integer and taken modulo 2**32. ModelError for a seed that is not finite.
    """
    seed = c.attr("seed")
    if seed is not None and not isfinite(seed):
        c.fail(f"seed is {seed}, expected a finite number")
    return np.random.RandomState(None if seed is None else int(seed) % (1 << 32))


class Random(OpDef):
    """Family base: random numbers of the element type `dtype`, drawn again in every run."""

    pure = False
    outputs = "output"
    zero_gradient = "the numbers drawn do not change with small changes"

    def draw(self, c: NodeView, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError


class Shaped(Random):
    """Family base: the shape and the element type are the attributes `shape` and `dtype`."""

    inputs = ""

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if min(c.attr("shape"), default=0) < 0:
            c.fail(f"shape is {list(c.attr('shape'))}, expected extents of 0 or more")
        return [TensorType(as_dtype(c, c.attr("dtype")), tuple(c.attr("shape")))]

    def reference(self, c: Call, *_: Array) -> Array:
        return np.asarray(self.draw(c, tuple(c.attr("shape")))).astype(as_dtype(c, c.attr("dtype")).numpy)


class Alike(Random):
    """Family base: the shape is that of the input, and so is the element type unless the attribute `dtype` is set."""

    inputs = "input"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_, dtype = c.tensor(0), c.attr("dtype")
        return [TensorType(type_.dtype if dtype is None else as_dtype(c, dtype), type_.shape)]

    def reference(self, c: Call, x: Array) -> Array:
        dtype = c.attr("dtype")
        return np.asarray(self.draw(c, x.shape)).astype(x.dtype if dtype is None else as_dtype(c, dtype).numpy)


def _normal(c: NodeView, shape: tuple[int, ...]) -> Any:
    if not c.attr("scale") >= 0:
        c.fail(f"scale is {c.attr('scale')}, expected a number of 0 or more")
    return generator(c).normal(c.attr("mean"), c.attr("scale"), shape)


def _uniform(c: NodeView, shape: tuple[int, ...]) -> Any:
    if not isfinite(c.attr("high") - c.attr("low")):
        c.fail(f"low and high are {c.attr('low')} and {c.attr('high')}, expected finite numbers")
    return generator(c).uniform(c.attr("low"), c.attr("high"), shape)


@register
class RandomNormal(Shaped):
    attrs = {**_SEED, "shape": Required("ints"), "dtype": 1, "mean": 0.0, "scale": 1.0}

    def draw(self, c: NodeView, shape: tuple[int, ...]) -> Any:
        return _normal(c, shape)


@register
class RandomUniform(Shaped):
    attrs = {**_SEED, "shape": Required("ints"), "dtype": 1, "low": 0.0, "high": 1.0}

    def draw(self, c: NodeView, shape: tuple[int, ...]) -> Any:
        return _uniform(c, shape)


@register
class RandomNormalLike(Alike):
    attrs = {**_SEED, "dtype": None, "mean": 0.0, "scale": 1.0}

    def draw(self, c: NodeView, shape: tuple[int, ...]) -> Any:
        return _normal(c, shape)


@register
class RandomUniformLike(Alike):
    attrs = {**_SEED, "dtype": None, "low": 0.0, "high": 1.0}

    def draw(self, c: NodeView, shape: tuple[int, ...]) -> Any:
        return _uniform(c, shape)


@register
class Multinomial(Random):
    """Classes drawn `sample_size` times for each row of unnormalized log-probabilities [N, classes]."""

    agreeing = True
    inputs = "input"
    attrs = {**_SEED, "dtype": 6, "sample_size": 1}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, FLOAT)
        dtype, shape = as_dtype(c, c.attr("dtype")), c.shape(0)
        if dtype not in (DType.INT32, DType.INT64) or c.attr("sample_size") < 1:
            c.fail(f"dtype is {dtype}, sample_size {c.attr('sample_size')}, expected int32 or int64 and at least 1")
        if shape is not None and (len(shape) != 2 or shape[1] == 0):
            c.fail(f"input is {c.tensor(0)}, expected rank 2 and at least one class")
        return [TensorType(dtype, None if shape is None else (shape[0], c.attr("sample_size")))]

    def reference(self, c: Call, x: Array) -> Array:
        scores = x.astype(np.float64)
        shares = np.cumsum(np.exp(scores - scores.max(axis=1, keepdims=True)), axis=1)
        points = generator(c).uniform(size=(len(x), c.attr("sample_size"))) * shares[:, -1:]
        drawn = [np.searchsorted(row, mine, side="right") for row, mine in zip(shares, points, strict=True)]
        return np.array(drawn).reshape(points.shape).astype(as_dtype(c, c.attr("dtype")).numpy)


@register
class Dropout(OpDef):
    """In inference: the data unchanged, and a mask of true.

    If `training_mode` is true, each element becomes zero with probability `ratio` (0.5 by default), and the others are
    divided by 1 - ratio. The mask is true for the elements that are not dropped.
    """

    inputs = "data, ratio?, training_mode?"
    outputs = "output, mask"
    attrs = {**_SEED}
    pure = False
    params = {"ratio": 1, "training_mode": 2}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [c.tensor(0), TensorType(DType.BOOL, c.shape(0))]

    def reference(self, c: Call, x: Array, *_: Any) -> tuple[Array, Array]:
        ratio = float((c.param("ratio") or (0.5,))[0])
        if not any(c.param("training_mode") or ()) or ratio == 0:
            return x, np.ones(x.shape, np.bool_)
        if not 0 <= ratio < 1:
            c.fail(f"ratio is {ratio}, expected at least 0 and below 1")
        kept: Any = generator(c).uniform(0, 1, x.shape) >= ratio
        return (kept * as_computed(x) * (1 / (1 - ratio))).astype(x.dtype), kept

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if axes[0] is not None and self._may_train(c):
            return MixesRows("its random mask depends on the position of a row in the batch")
        return [axes[0]] * len(c.node.outputs)

    def _may_train(self, c: Infer) -> bool:
        return c.has_param("training_mode") and any(c.param("training_mode") or (True,))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """dY / (1 - ratio) where the mask, an output of the node, is true, zero elsewhere; dY itself in inference.

        UnsupportedError in training if `ratio` is not known or the node does not return its mask.
        """
        if not self._may_train(g):
            return [g.dy()]
        ratio = (g.param("ratio") or (0.5,))[0] if not g.has_input(1) or g.param("ratio") else None
        if ratio is None or len(g.node.outputs) < 2:
            g.unsupported("its ratio must be known, and its mask an output, to differentiate it in training")
        return [g.y(1).where(g.dy() * (1 / (1 - ratio)), 0)]
