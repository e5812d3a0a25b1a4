"""Pooling: sliding windows and global."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.nn.spatial import (
    WINDOW_ATTRS,
    Pads,
    Window,
    as_summed,
    batch_rows,
    channels_last,
    first_shape,
    layout_shape,
    pool_output,
    to_first,
    to_layout,
    window_of,
)
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import mean_over


class Pool(OpDef):
    """The base of MaxPool, AveragePool and LpPool: one input X (N, C, D1..), a window slides over its spatial axes."""

    inputs = "X"
    outputs = "Y"
    attrs = {**WINDOW_ATTRS, "kernel_shape": Required("ints"), "ceil_mode": 0, "layout": "NCHW"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is None:
            return [x]
        return [TensorType(x.dtype, layout_shape(c, _pooled_shape(c, first_shape(c, x.shape))))]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)


@register
class MaxPool(Pool):
    """The greatest element of each window, and optionally its index in the flattened input.

    Without indices, the maximum of a window with NaN is NaN. With indices, NaN counts only if it is the window's first
    element, as in ONNX Runtime (whose maxima without indices depend on the order of its vector code).
    """

    outputs = "Y, Indices"
    attrs = {**Pool.attrs, "storage_order": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        (y,) = super().infer(c)
        assert isinstance(y, TensorType)
        return [y, TensorType(DType.INT64, y.shape)]

    def reference(self, c: Call, x: Array) -> Array | tuple[Array, Array]:
        first = to_first(c, x)
        if len(c.node.outputs) == 1:
            return to_layout(c, _window_max(c, first))
        y, taken = _window_argmax(c, first)
        return to_layout(c, y), to_layout(c, _flat_indices(c, taken, first.shape))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if len(c.node.outputs) > 1 and axes[0] is not None:
            return MixesRows("its second output counts positions over the whole batch")
        return super().rows(c, axes)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        attrs = {name: value for name, value in g.node.attrs.items() if name != "storage_order"}
        return [g.x().op("MaxPoolGradient", g.dy(), **attrs)]


@register
class AveragePool(Pool):
    """The mean of each window; padding counts as zeros with `count_include_pad`, otherwise not at all."""

    attrs = {**Pool.attrs, "count_include_pad": 0}

    def reference(self, c: Call, x: Array) -> Array:
        first = to_first(c, x)
        window, out = _window_and_output(c, first.shape)
        count = _window_count(c, window, first.shape[2:], out)
        total = _window_sum(window, as_summed(first), out)
        return to_layout(c, (total / count.astype(total.dtype)).astype(x.dtype, copy=False))

    def definition(self, g: Rewrite) -> Sequence[Term]:
        total, window = _window_sums(g, g.x())
        return [total / _divisor(g, window, total)]


@register
class LpPool(Pool):
    """The p-norm of each window."""

    attrs = {**Pool.attrs, "p": 2}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        _check_norm(c)
        return super().infer(c)

    def reference(self, c: Call, x: Array) -> Array:
        first, p = to_first(c, x), c.attr("p")
        window, out = _window_and_output(c, first.shape)
        total = _window_sum(window, np.abs(as_summed(first)) ** p, out)
        return to_layout(c, (total ** (1 / p)).astype(x.dtype, copy=False))

    def definition(self, g: Rewrite) -> Sequence[Term]:
        p = g.attr("p")
        return [_window_sums(g, g.x().abs() ** p)[0] ** (1 / p)]


@register
class MaxPoolGradient(OpDef):
    """The gradient of MaxPool with respect to X: each element of dY goes to the first maximum of its window."""

    domain = "lathe"
    inputs = "X, dY"
    outputs = "dX"
    attrs = {name: default for name, default in MaxPool.attrs.items() if name != "storage_order"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return [c.tensor(0)]

    def reference(self, c: Call, x: Array, dy: Array) -> Array:
        first, given = to_first(c, x), to_first(c, dy)
        taken = _window_argmax(c, first)[1]
        pixels, windows = (int(np.prod(each.shape[2:])) for each in (first, given))
        dx = np.zeros((first.shape[0] * first.shape[1], pixels), x.dtype)
        images = np.arange(len(dx))[:, None]
        np.add.at(dx, (images, taken.reshape(len(dx), windows)), given.reshape(len(dx), windows))
        return to_layout(c, dx.reshape(first.shape))

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        places = g.x(0).ops("MaxPool", outputs=2, **g.node.attrs)[1]
        flat = g.dy().reshape((g.dy().value.tensor.size,))
        return [None, flat.gather(places)]


class GlobalPool(OpDef):
    """Family base: every spatial axis reduced to 1."""

    inputs = "X"
    outputs = "Y"
    attrs = {"layout": "NCHW"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is None:
            return [x]
        n, channels, *spatial = first_shape(c, x.shape)
        return [TensorType(x.dtype, layout_shape(c, (n, channels, *(1 for _ in spatial))))]

    def reference(self, c: Call, x: Array) -> Array:
        first = as_summed(to_first(c, x))
        reduced = self.reduce(c, first, tuple(range(2, first.ndim)))
        return to_layout(c, np.asarray(reduced).astype(x.dtype, copy=False))

    def reduce(self, c: NodeView, x: Any, axes: tuple[int, ...]) -> Any:
        """The reduction of x (N, C, D1..) over its spatial axes, which stay with extent 1; subclasses define it."""
        raise NotImplementedError

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def spatial_axes(self, g: Rewrite) -> list[int]:
        first = int(not channels_last(g)) + 1
        return list(range(first, first + g.x().rank - 2))


@register
class GlobalAveragePool(GlobalPool):
    def reduce(self, c: NodeView, x: Any, axes: tuple[int, ...]) -> Any:
        return mean_over(x, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        return [g.x().mean(self.spatial_axes(g))]


@register
class GlobalMaxPool(GlobalPool):
    def reduce(self, c: NodeView, x: Any, axes: tuple[int, ...]) -> Any:
        if 0 in x.shape[:2]:  # NumPy has no maximum of an empty array
            return np.empty((*x.shape[:2], *(1 for _ in axes)), x.dtype)
        if x.size == 0:
            c.fail(f"X has spatial shape {list(x.shape[2:])}, expected at least one pixel")
        return x.max(axis=axes, keepdims=True)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        return [g.x().max(self.spatial_axes(g))]


@register
class GlobalLpPool(GlobalPool):
    attrs = {**GlobalPool.attrs, "p": 2}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        _check_norm(c)
        return super().infer(c)

    def reduce(self, c: NodeView, x: Any, axes: tuple[int, ...]) -> Any:
        p = c.attr("p")
        return (np.abs(x) ** p).sum(axis=axes, keepdims=True) ** (1 / p)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        p = g.attr("p")
        return [(g.x().abs() ** p).sum(self.spatial_axes(g)) ** (1 / p)]


def _check_norm(c: Infer) -> None:
    if c.attr("p") < 1:
        c.fail(f"p is {c.attr('p')}, expected at least 1")


def _window_sums(g: Rewrite, x: Term) -> tuple[Term, Window]:
    """The sum of each window, by a depthwise convolution with ones; and the window with explicit padding.

    The padding is extended by the elements that `ceil_mode` reads. UnsupportedError for channels-last images, and if
    the padding depends on unknown extents.
    """
    window = window_of(g, g.attr("kernel_shape"))
    out = g.node.output.shape[2:]
    sizes = [size for size in (*x.shape[2:], *out) if isinstance(size, int)]
    if channels_last(g) or ((window.pads is None or g.attr("ceil_mode")) and len(sizes) < 2 * len(out)):
        g.unsupported(
            f"only images with their channels first and of known size are differentiated, X is {x.value.type}"
        )
    if len(sizes) == 2 * len(out):
        window = dataclasses.replace(window, pads=_read_padding(window, sizes[: len(out)], sizes[len(out) :]))
    planes = x.reshape((x.shape[0] * x.shape[1], 1, *x.shape[2:]))
    ones = g.writer.fill(1, x.dtype, (1, 1, *window.kernel))
    pads = window.pads or ()
    flat = (*(before for before, _ in pads), *(after for _, after in pads))
    total = planes.op("Conv", ones, strides=window.strides, dilations=window.dilations, pads=flat)
    return total.reshape(g.node.output.shape), window


def _read_padding(window: Window, spatial: Sequence[int], out: Sequence[int]) -> Pads:
    """The padding that the windows of an output of shape `out` read around an image of shape `spatial`."""
    axes = zip(window.pads_for(spatial), spatial, out, window.strides, window.extents, strict=True)
    return tuple(
        (before, max((count - 1) * stride + extent - size - before, 0))
        for (before, _), size, count, stride, extent in axes
    )


def _divisor(g: Rewrite, window: Window, total: Term) -> Term | float:
    """The number of elements in each window: one number without padding, otherwise a constant per window.

    `total` has the sums of the windows. UnsupportedError if there is padding and the size of the image is not known.
    """
    if not any(map(any, window.pads or ())):
        return float(np.prod(window.kernel))
    sizes = [size for size in g.x().shape[2:] if isinstance(size, int)]
    out = [size for size in total.shape[2:] if isinstance(size, int)]
    if len(sizes) < len(window.kernel):
        return g.unsupported(f"with padding the size of the image must be known, X is {g.tensor(0)}")
    return g.writer.array(_window_count(g, window_of(g, g.attr("kernel_shape")), tuple(sizes), out), total.dtype)


def _pooled_shape(c: Infer, first: Sequence[Dim]) -> tuple[Dim, ...]:
    window = window_of(c, c.attr("kernel_shape"))
    return (*first[:2], *pool_output(c, window, first[2:], ceil_mode=bool(c.attr("ceil_mode"))))


def _window_and_output(c: Call, shape: tuple[int, ...]) -> tuple[Window, tuple[int, ...]]:
    """The window of the node, and the spatial output shape for a channels-first input of this shape."""
    dims = _pooled_shape(c.shown(), shape)[2:]
    return window_of(c, c.attr("kernel_shape")), tuple(evaluate(dim, {}) for dim in dims)


def _window_sum(window: Window, x: Any, out: Sequence[int]) -> Any:
    padded = window.padded(x, out)
    return sum(padded[where] for _, where in window.taps(out))


def _window_count(c: NodeView, window: Window, spatial: tuple[int, ...], out: Sequence[int]) -> Any:
    """The number of elements in each window, [1, 1, *out]. Padding counts with `count_include_pad` only.

    Elements that `ceil_mode` adds after the padding never count.
    """
    inside = np.ones((1, 1, *spatial), np.float32)
    if c.attr("count_include_pad"):
        inside = np.pad(inside, [(0, 0), (0, 0), *window.pads_for(spatial)], constant_values=1)
        window = dataclasses.replace(window, pads=((0, 0),) * len(out))
    return _window_sum(window, inside, out)


def _lowest(dtype: np.dtype[Any]) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _window_max(c: Call, x: Any) -> Any:
    window, out = _window_and_output(c, x.shape)
    padded = window.padded(x, out, _lowest(x.dtype))
    y = np.full((*x.shape[:2], *out), _lowest(x.dtype), x.dtype)
    for _, where in window.taps(out):
        np.maximum(y, padded[where], out=y)
    return y


def _window_argmax(c: Call, x: Any) -> tuple[Any, Any]:
    """The maxima of the windows of a channels-first x, and their row-major indices within the image.

    The first of equal maxima counts.
    """
    window, out = _window_and_output(c, x.shape)
    padded = window.padded(x, out, _lowest(x.dtype))
    position: Any = np.arange(int(np.prod(x.shape[2:]))).reshape(1, 1, *x.shape[2:])
    position = window.padded(position, out, -1)
    y = np.full((*x.shape[:2], *out), _lowest(x.dtype), x.dtype)
    taken: Any = np.full(y.shape, -1)
    for _, where in window.taps(out):
        better = (padded[where] > y) | ((taken < 0) & (position[where] >= 0))
        y = np.where(better, padded[where], y)
        taken = np.where(better, position[where], taken)
    return y, taken


def _flat_indices(c: Call, taken: Any, shape: tuple[int, ...]) -> Any:
    """Row-major indices within an image as indices within the whole tensor of this shape, N, C, D1..

    With `storage_order` 1, indices within an image become column-major.
    """
    if c.attr("storage_order"):
        coordinates = np.unravel_index(taken, shape[2:])
        taken = np.ravel_multi_index(coordinates[::-1], shape[:1:-1])
    images = np.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *(1,) * (len(shape) - 2))
    return (taken + images * int(np.prod(shape[2:]))).astype(np.int64)
