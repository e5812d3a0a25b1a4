"""Convolution and its transpose, over any number of spatial axes.

References take one matrix product per kernel element and add them up: no im2col copy, any group count at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lathe.core.ir.dim import evaluate, product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.nn.conv_gradient import explicit_pads, flat_pads, image_gradient, shared_attrs
from lathe.core.ops.nn.fused import apply_epilogue, check_extras, epilogue_dtype
from lathe.core.ops.nn.narrow_products import as_product_operands, check_epilogue, padded_total, product_dtype
from lathe.core.ops.nn.spatial import (
    WINDOW_ATTRS,
    Pads,
    Window,
    as_summed,
    batch_rows,
    first_shape,
    fresh_spatial,
    kernel_of,
    layout_shape,
    to_first,
    to_layout,
    window_of,
    window_output,
)
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import expect_shape, same_dtype

POOL_SIZE = 2  # the window and stride of PooledConv, along both axes
_MOST_IMAGES = 49  # the most images that the definition of a depthwise convolution adds up
_FEW_CHANNELS, _FEW_OUTPUTS, _LONGEST_LINE = 4, 8, 11  # limits of `has_few_channels`


@register
class Conv(OpDef):
    """Cross-correlation of X (N, C, D1..) with W (M, C/group, K1..), plus B (M); images are as `layout` says."""

    agreeing = True
    rounds_freely = True
    inputs = "X, W, B?"
    outputs = "Y"
    attrs = {**WINDOW_ATTRS, "group": 1, "layout": "NCHW"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, range(min(len(c.node.inputs), 3)))
        return [TensorType(dtype, conv_shape(c))]

    def reference(self, c: Call, x: Array, w: Array, b: Array | None = None, *_: Array) -> Array:
        return to_layout(c, convolve(c, to_first(c, x), w, b))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        x, w, dy = g.x(0), g.x(1), g.dy()
        kernel = known_kernel(g, w.shape)
        pads, attrs = explicit_pads(g, kernel, x.shape), shared_attrs(g)
        dx = image_gradient(dy, w, x.shape, attrs, pads) if g.wants(0) else None
        dw = x.op("ConvWeightGradient", dy, **attrs, pads=flat_pads(pads), kernel_shape=kernel)
        return [dx, dw, dy.sum([0, *range(2, dy.rank)], keepdims=False) if g.wants(2) else None]

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """For weights that are computed in the run: im2col and one matrix product per group.

        A depthwise convolution is a sum of shifted images instead, one for each of up to 49 elements of the kernel.
        UnsupportedError for constant weights, which kernels cover, for channels last, and if extents of the weights,
        the padding, or the equality of the numbers of channels are not known.
        """
        x, w, bias, out = g.x(0), g.x(1), g.x_or_none(2), g.node.output.shape
        if w.value in g.writer.known:
            g.unsupported("its weights are constant, so kernels cover it")
        kernel, group = known_kernel(g, w.shape), g.attr("group")
        if not all(isinstance(extent, int) for extent in w.shape):
            g.unsupported("the number of channels is not known")
        if x.shape[1] != group * w.shape[1] or (bias is not None and bias.shape != (w.shape[0],)):
            g.unsupported("the numbers of channels of the image and of the weights are not known to agree")
        padded = x.pad([(0, 0), (0, 0), *explicit_pads(g, kernel, x.shape)])
        window, taps = window_of(g, kernel), prod(kernel)
        seen = [_pixels_of_tap(padded, window, out[2:], place) for place in np.ndindex(*kernel)]
        if w.shape[0] == group and w.shape[1] == 1 and taps <= _MOST_IMAGES:
            factors = w.reshape((group, taps, *(1 for _ in kernel)))
            images = [image * factors.slice(1, i, i + 1).squeeze(1) for i, image in enumerate(seen)]
            y = sum(images[1:], start=images[0])
        else:
            columns = [image.unsqueeze(2) for image in seen]
            stacked = columns[0].op("Concat", *columns[1:], axis=2) if taps > 1 else columns[0]
            matrix = stacked.reshape((x.shape[0], group, w.shape[1] * taps, product(out[2:])))
            y = (w.reshape((group, w.shape[0] // group, w.shape[1] * taps)) @ matrix).reshape(out)
        return [y if bias is None else y + bias.reshape((w.shape[0], *(1 for _ in kernel)))]


def _pixels_of_tap(padded: Term, window: Window, out: Sequence[Dim], place: Sequence[int]) -> Term:
    """The pixels of a padded image that kernel element `place` multiplies, for results of spatial shape `out`."""
    for axis, (count, at, stride, dilation) in enumerate(
        zip(out, place, window.strides, window.dilations, strict=True)
    ):
        first = at * dilation
        padded = padded.slice(axis + 2, first, first + (count - 1) * stride + 1, stride)
    return padded


@register
class FusedConv(Conv):
    """A convolution with an epilogue: Y = epilogue(conv(X, W) + B, *extras).

    `pads` are explicit, and filled with `pad_value`, which is 0 unless X is uint8. Extras broadcast to Y in the node's
    layout. X may be narrower than the product, whose type B has (`lathe.core.ops.nn.narrow_products` lists the pairs of
    types).
    """

    domain = "lathe"
    inputs = "X, W, B?, *extras"
    attrs = {**Conv.attrs, "epilogue": None, "pad_value": 0, "exact": 0}
    no_gradient = "only passes emit it, after differentiation"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape = product_dtype(c), conv_shape(c)
        check_epilogue(c, dtype)
        if not 0 <= c.attr("pad_value") <= (255 if c.dtype(0) is DType.UINT8 else 0):
            c.fail(f"pad_value is {c.attr('pad_value')} for {c.dtype(0)}, expected 0, or up to 255 for uint8")
        if c.has_input(2) and c.dtype(2) is not dtype:
            c.fail(f"B is {c.dtype(2)}, the product is {dtype}")
        if shape is not None:
            check_extras(c, 3, shape)
        return [TensorType(epilogue_dtype(c, dtype), shape)]

    def reference(self, c: Call, x: Array, w: Array, b: Array | None = None, *extras: Array) -> Array:
        x, w = as_product_operands(x, w)
        fill = c.attr("pad_value")
        if fill:
            total = padded_total(w, fill)
            x, b = x - x.dtype.type(fill), total if b is None else b + total
        return apply_epilogue(c, super().reference(c, x, w, b), extras)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if axes[0] is not None:
            for index, axis in enumerate(axes[3:], start=3):
                if _varies_by_row(c, index) != (axis == 0):
                    return MixesRows(f"the rows of extra input {index} do not match those of the result")
            axes = axes[:3]
        return batch_rows(c, axes)


@register
class PooledConv(FusedConv):
    """A FusedConv followed by a 2x2 pooling with stride 2: "max" or "average". An odd last row or column is dropped."""

    attrs = {**FusedConv.attrs, "pool": Required("text")}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        (full,) = super().infer(c)
        assert isinstance(full, TensorType)
        if full.shape is None:
            return [full]
        n, channels, *sizes = first_shape(c, full.shape)
        return [TensorType(full.dtype, layout_shape(c, (n, channels, *(size // POOL_SIZE for size in sizes))))]

    def reference(self, c: Call, x: Array, w: Array, b: Array | None = None, *extras: Array) -> Array:
        full = to_first(c, super().reference(c, x, w, b, *extras))
        lines, columns = (size // POOL_SIZE for size in full.shape[2:])
        blocks = full[:, :, : lines * POOL_SIZE, : columns * POOL_SIZE]
        blocks = blocks.reshape(*full.shape[:2], lines, POOL_SIZE, columns, POOL_SIZE)
        pooled = blocks.max((3, 5)) if c.attr("pool") == "max" else blocks.mean((3, 5))
        return to_layout(c, pooled.astype(full.dtype, copy=False))


@register
class ConvChain(OpDef):
    """A chain of convolutions of channels-last images: each reads the result of the previous one.

    `body` has a FusedConv node for each. Its inputs are those of this node: the image, then the weights, biases and
    extra inputs of epilogues of all convolutions.
    """

    domain = "lathe"
    inputs = "X, *parameters"
    outputs = "Y"
    attrs = {"body": Required("graph")}
    no_gradient = "only passes emit it, after differentiation"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        body = c.attr("body")
        if len(body.inputs) != len(c.node.inputs):
            c.fail(f"its convolutions read {len(body.inputs)} inputs, but it has {len(c.node.inputs)}")
        for index, value in enumerate(body.inputs):
            value.type = c.tensor(index)
        infer_graph(body)
        return [value.type for value in body.outputs]

    def reference(self, c: Call, *inputs: Array) -> Array:
        return np.asarray(c.run_graph(c.attr("body"), inputs)[0])

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """The image and all extra inputs that vary along axis 0 must have rows there; no other input may."""
        if all(axis is None for axis in axes):
            return [None]
        if axes[0] != 0:
            return MixesRows("its rows do not lie along the batch axis of the image")
        body = c.attr("body")
        weights = {value for node in body.nodes for value in node.inputs[1:3]}
        for index, value in enumerate(body.inputs[1:], start=1):
            if (value not in weights and _varies_by_row(c, index)) != (axes[index] == 0):
                return MixesRows(f"the rows of input {index} do not match those of the result")
        return [0]


@register
class ConvTranspose(OpDef):
    """The transpose of a convolution: from X (N, C, D1..), W (C, M/group, K1..) and B (M) to Y (N, M, O1..)."""

    agreeing = True
    rounds_freely = True
    inputs = "X, W, B?"
    outputs = "Y"
    attrs = {**Conv.attrs, "output_padding": None, "output_shape": None}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, range(len(c.node.inputs)))
        x, w = c.shape(0), c.shape(1)
        if x is None or w is None:
            return [TensorType(dtype, None)]
        n, channels, *spatial = first_shape(c, x)
        group = _group(c)
        _check_weight(c, w, len(spatial), channels, w[0])
        expect_shape(c, 2, (w[1] * group,))
        kernel = kernel_of(c, w)
        out = fresh_spatial(c, len(spatial)) if kernel is None else _transposed_output(c, spatial, kernel)
        return [TensorType(dtype, layout_shape(c, (n, w[1] * group, *out)))]

    def reference(self, c: Call, x: Array, w: Array, b: Array | None = None) -> Array:
        return to_layout(c, _conv_transpose(c, to_first(c, x), w, b))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """The image and the result of a convolution exchange their roles.

        dX is the convolution of dY with W. dW is ConvWeightGradient with dY in place of its X, and X in place of its
        dY.
        """
        x, w, dy = g.x(0), g.x(1), g.dy()
        pads, attrs = self._cut_widths(g, x.shape, w.shape[2:], dy.shape), shared_attrs(g)
        dx = dy.op("Conv", w, **attrs, pads=flat_pads(pads))
        dw = dy.op("ConvWeightGradient", x, **attrs, pads=flat_pads(pads), kernel_shape=tuple(w.shape[2:]))
        return [dx, dw, dy.sum([0, *range(2, dy.rank)], keepdims=False) if g.wants(2) else None]

    def _cut_widths(self, g: Backward, x: Sequence[Dim], kernel: Sequence[Dim], y: Sequence[Dim]) -> Pads:
        """The numbers of elements that padding cuts off the full result, (before, after) per axis.

        UnsupportedError for unknown extents, other layouts, and an `output_shape` larger than the full result.
        """
        extents = known_kernel(g, (0, 0, *kernel))
        sizes = [size for size in (*x[2:], *y[2:]) if isinstance(size, int)]
        if g.attr("layout") != "NCHW" or len(sizes) < 2 * len(extents):
            g.unsupported(
                f"only images with their channels first and of known size are differentiated, X is {g.tensor(0)}"
            )
        spatial, out = sizes[: len(extents)], sizes[len(extents) :]
        window = window_of(g, extents)
        full = _full_extent(window, spatial, _output_padding(g, len(spatial)))
        cuts = _transposed_cuts(g, window, _less(full, out))
        pads = tuple((cut, size - cut - kept) for size, cut, kept in zip(full, cuts, out, strict=True))
        if any(after < 0 for _, after in pads):
            g.unsupported("an output_shape beyond the reach of the windows is not differentiated")
        return pads


def has_few_channels(c: NodeView, weight: Sequence[int]) -> bool:
    """Whether SIMD vectors over channels would be mostly empty, but those along the rows of an image full.

    `weight` is the shape of W. It is true for 2-D convolutions without groups from at most 4 channels to at most 8,
    with a kernel of 2 to 11 columns and a horizontal stride of 1. PooledConv is for such convolutions only.
    """
    if len(weight) != 4 or int(c.attr("group")) != 1:
        return False
    few = weight[0] <= _FEW_OUTPUTS and weight[1] <= _FEW_CHANNELS
    strides = c.attr("strides") or (1, 1)
    return few and 1 < weight[3] <= _LONGEST_LINE and int(strides[1]) == 1


def conv_shape(c: Infer) -> tuple[Dim, ...] | None:
    """The output shape of a convolution node, in its layout; None if a rank is not known.

    ModelError if X, W and B do not fit each other.
    """
    shape, w = convolved_shape(c, c.shape(0), c.shape(1)), c.shape(1)
    if w is not None:
        expect_shape(c, 2, w[:1])
    return shape


def convolved_shape(c: Infer, x: Sequence[Dim] | None, w: Sequence[Dim] | None) -> tuple[Dim, ...] | None:
    """The output shape of a convolution of operands of these shapes; None if one is None.

    ModelError if they do not fit. Shapes of images are in the node's layout.
    """
    if x is None or w is None:
        return None
    n, channels, *spatial = first_shape(c, x)
    group = _group(c)
    _check_weight(c, w, len(spatial), channels, w[1] * group if len(w) > 1 else 0)
    if isinstance(w[0], int) and w[0] % group:
        c.fail(f"W has {w[0]} output channels, not divisible by group {group}")
    kernel = kernel_of(c, w)
    out = fresh_spatial(c, len(spatial)) if kernel is None else window_output(c, window_of(c, kernel), spatial)
    return layout_shape(c, (n, w[0], *out))


def _varies_by_row(c: Infer, index: int) -> bool:
    """Whether extra input `index` varies along axis 0: it has the output's rank, and an extent other than 1 there."""
    x, extra = c.shape(0), c.shape(index)
    return x is not None and extra is not None and len(extra) == len(x) and extra[0] != 1


def conv_pads(c: Infer) -> Pads | None:
    """The explicit padding of a convolution, with `auto_pad` resolved.

    None if the extents of the kernel are not known, or if `auto_pad` needs extents of the image that are not known.
    UnknownRankError if the rank of X or W is not known.
    """
    kernel = kernel_of(c, c.tensor(1).dims)
    if kernel is None:
        return None
    window = window_of(c, kernel)
    spatial = first_shape(c, c.tensor(0).dims)[2:]
    if window.pads is not None:
        return window.pads
    known = [size for size in spatial if isinstance(size, int)]
    return window.pads_for(known) if len(known) == len(spatial) else None


def known_kernel(c: Infer, w: Sequence[Dim]) -> tuple[int, ...]:
    """The spatial extents of a weight of shape `w`. UnsupportedError if they are not known."""
    kernel = kernel_of(c, w)
    return kernel if kernel is not None else c.unsupported(f"the extents of its kernel {list(w[2:])} must be known")


def _group(c: Infer) -> int:
    group = c.attr("group")
    if group < 1:
        c.fail(f"group is {group}, expected at least 1")
    return int(group)


def _check_weight(c: Infer, w: Sequence[Dim], spatial: int, channels: Dim, expected: Dim) -> None:
    if len(w) != spatial + 2 or spatial < 1:
        c.fail(f"X has {spatial} spatial axes, W has rank {len(w)}, expected rank {spatial + 2} and at least one axis")
    if not c.agree(channels, expected):
        c.fail(f"X has {channels} channels, W expects {expected} (group {c.attr('group')})")
    if isinstance(channels, int) and channels % c.attr("group"):
        c.fail(f"X has {channels} channels, not divisible by group {c.attr('group')}")


def convolve(c: Call, x: Any, w: Any, b: Any) -> Any:
    """The convolution of x (N, C, D1..) with w plus bias b (or None), channels first, in the type of x.

    It is the sum of a product (group, M/g, C/g) by (n, group, C/g, pixels) for each kernel element.
    """
    window = window_of(c, w.shape[2:])
    group, dtype = c.attr("group"), x.dtype
    out = _conv_output(window, x.shape[2:])
    padded, w = window.padded(as_summed(x), out), as_summed(w)
    n, m, depth = x.shape[0], w.shape[0], w.shape[1]
    y = np.zeros((n, group, m // group, int(np.prod(out))), w.dtype)
    for tap, where in window.taps(out):
        kernel = w[tap].reshape(group, m // group, depth)
        y += kernel @ padded[where].reshape(n, group, depth, y.shape[3])
    return _with_bias(y.reshape(n, m, *out), b).astype(dtype, copy=False)


def _conv_output(window: Window, spatial: Sequence[int]) -> tuple[int, ...]:
    pads = window.pads_for(spatial)
    return tuple(
        (size + before + after - extent) // stride + 1
        for size, (before, after), extent, stride in zip(spatial, pads, window.extents, window.strides, strict=True)
    )


def _with_bias(y: Any, b: Any) -> Any:
    return y if b is None else y + b.astype(y.dtype).reshape(-1, *(1,) * (y.ndim - 2))


def _transposed_output(c: Infer, spatial: Sequence[Dim], kernel: Sequence[int]) -> Sequence[Dim]:
    window, given = window_of(c, kernel), c.attr("output_shape")
    extra = _output_padding(c, len(spatial))
    if given is not None:
        if len(given) < len(spatial) or min(given) < 1:
            c.fail(f"output_shape is {list(given)}, expected {len(spatial)} numbers of at least 1")
        return list(given)[-len(spatial) :]
    if window.pads is None:
        out, reason = [size * stride for size, stride in zip(spatial, window.strides, strict=True)], "X is empty"
    else:
        full, reason = _full_extent(window, spatial, extra), f"pads {window.pads} are larger than what they cut"
        out = [size - (before + after) for size, (before, after) in zip(full, window.pads, strict=True)]
    if any(isinstance(size, int) and size < 1 for size in out):
        c.fail(f"output would have spatial shape {out}: {reason}")
    return out


def _output_padding(c: NodeView, rank: int) -> tuple[int, ...]:
    given = tuple(c.attr("output_padding") or (0,) * rank)
    if len(given) != rank or min(given) < 0:
        c.fail(f"output_padding is {list(given)}, expected {rank} numbers of at least 0")
    return given


def _full_extent(window: Window, spatial: Sequence[Any], extra: Sequence[int]) -> list[Any]:
    """The spatial output shape of a transposed convolution before padding is cut off; `extra` is `output_padding`."""
    axes = zip(spatial, window.strides, window.extents, extra, strict=True)
    return [(size - 1) * stride + (extent + more) for size, stride, extent, more in axes]


def transposed_cuts(c: Infer, spatial: Sequence[Dim], kernel: Sequence[int]) -> list[int] | None:
    """The number of elements cut off the start of a transposed convolution's full output, per axis.

    None if that depends on extents that are not known.
    """
    window, out = window_of(c, kernel), _transposed_output(c, spatial, kernel)
    full: Sequence[Dim] = _full_extent(window, spatial, _output_padding(c, len(spatial)))
    known = [lost for size, kept in zip(full, out, strict=True) if isinstance(lost := size - kept, int)]
    return _transposed_cuts(c, window, known) if len(known) == len(full) else None


def _transposed_cuts(c: NodeView, window: Window, lost: Sequence[int]) -> list[int]:
    """The number of elements cut off the start of the full output, per axis; `lost` is the number cut off both ends."""
    if window.pads is not None and c.attr("output_shape") is None:
        return [before for before, _ in window.pads]
    totals = [max(each, 0) for each in lost]
    upper = c.attr("auto_pad") == "SAME_UPPER"
    return [total // 2 if upper else total - total // 2 for total in totals]


def _less(sizes: Sequence[int], others: Sequence[int]) -> list[int]:
    return [size - other for size, other in zip(sizes, others, strict=True)]


def _conv_transpose(c: Call, x: Any, w: Any, b: Any) -> Any:
    window = window_of(c, w.shape[2:])
    group, dtype, spatial = c.attr("group"), x.dtype, x.shape[2:]
    view = c.shown()
    out = [evaluate(size, {}) for size in _transposed_output(view, spatial, w.shape[2:])]
    full = _full_extent(window, spatial, _output_padding(c, len(spatial)))
    cuts = _transposed_cuts(c, window, _less(full, out))
    n, m = x.shape[0], w.shape[1] * group
    rows = as_summed(x).reshape(n, group, x.shape[1] // group, int(np.prod(spatial)))
    y = np.zeros((n, m, *(max(size, cut + kept) for size, cut, kept in zip(full, cuts, out, strict=True))), rows.dtype)
    for tap, where in window.taps(spatial):
        kernel = as_summed(w)[tap].reshape(group, w.shape[0] // group, w.shape[1]).swapaxes(1, 2)
        y[where] += (kernel @ rows).reshape(n, m, *spatial)
    kept: Any = (..., *(slice(cut, cut + size) for cut, size in zip(cuts, out, strict=True)))
    return _with_bias(y[kept], b).astype(dtype, copy=False)
