"""Col2Im and MaxUnpool, which put windows back into images; and Det, the determinant."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.nn.spatial import batch_rows, window_of
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.registry import (
    Call,
    Infer,
    MixesRows,
    NodeView,
    OpDef,
    Required,
    RowAxis,
    RuntimeValue,
    register,
)
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import FLOAT, as_computed, check_kind, expect_shape, untouched_rows


@register
class Col2Im(OpDef):
    """The image [N, C, image_shape] whose windows are the columns of [N, C * block elements, windows].

    Elements of overlapping windows are summed.
    """

    inputs = "input, image_shape, block_shape"
    outputs = "output"
    attrs = {"dilations": None, "pads": None, "strides": None}
    params = {"image_shape": 1, "block_shape": 2}
    symbolic = ("image_shape",)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x, image, block = c.tensor(0), c.param("image_shape"), c.param("block_shape")
        if x.shape is None or image is None or block is None:
            return [TensorType(x.dtype, None)]
        if len(x.shape) != 3 or len(image) != len(block):
            shapes = f"image_shape is {list(image)}, block_shape {list(block)}"
            c.fail(f"input is {x}, {shapes}: expected rank 3, and one length of the others")
        if any(isinstance(size, int) and size < 1 for size in block):
            c.fail(f"block_shape is {list(block)}, expected numbers of at least 1")
        channels = x.shape[1] // prod(block) if isinstance(x.shape[1], int) else c.fresh_dim("channels")
        if isinstance(x.shape[1], int) and x.shape[1] % prod(block):
            c.fail(f"input has {x.shape[1]} rows, not divisible by a block of {prod(block)}")
        return [TensorType(x.dtype, (x.shape[0], channels, *image))]

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        image, block = c.param("image_shape") or (), c.param("block_shape") or ()
        window = window_of(c, block)
        pads = window.pads_for(image)
        padded = [size + before + after for size, (before, after) in zip(image, pads, strict=True)]
        spans = zip(padded, window.extents, window.strides, strict=True)
        out = [(size - extent) // stride + 1 for size, extent, stride in spans]
        if prod(out) != x.shape[2]:
            c.fail(f"input has {x.shape[2]} windows, the image {prod(out)}")
        columns = as_computed(x).reshape(len(x), x.shape[1] // prod(block), *block, *out)
        y = np.zeros((len(x), columns.shape[1], *padded), columns.dtype)
        for tap, where in window.taps(out):
            y[where] += columns[(slice(None), slice(None), *tap[1:])]
        inside: Any = (slice(before, before + size) for size, (before, _) in zip(image, pads, strict=True))
        kept: Any = (..., *inside)
        return y[kept].astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """Reshapes and a transpose for blocks that tile the image, without gap, overlap, padding or remainder.

        Otherwise a transposed convolution with one input channel per block element. UnsupportedError for dilations, and
        for parameters that are not known.
        """
        image, block, x = g.param("image_shape"), g.param("block_shape"), g.x()
        if image is None or block is None or not all(isinstance(size, int) for size in image):
            g.unsupported("image_shape and block_shape must be known to write it as other operators")
        window, rank, count = window_of(g, block), len(block), prod(block)
        if (*window.extents,) != (*block,):
            g.unsupported("no transposed convolution with dilations is compiled")
        pads = window.pads_for(image)
        padded = [size + before + after for size, (before, after) in zip(image, pads, strict=True)]
        spans = list(zip(padded, window.extents, window.strides, strict=True))
        out = [(size - extent) // stride + 1 for size, extent, stride in spans]
        left = [(size - extent) % stride for size, extent, stride in spans]
        rows, channels = x.shape[0], x.shape[1] // count
        if (*block,) == (*window.strides,) and not any(left) and not any(map(any, pads)):
            order = [axis for i in range(rank) for axis in (2 + rank + i, 2 + i)]
            return [x.reshape((rows, channels, *block, *out)).transpose(0, 1, *order).reshape((rows, channels, *image))]
        planes = x.reshape((rows * channels, count, *out))
        places = g.writer.array(np.eye(count).reshape(count, 1, *block), x.dtype)
        given = {name: g.attr(name) for name in ("dilations", "pads", "strides") if g.attr(name) is not None}
        return [
            planes.op("ConvTranspose", places, output_padding=tuple(left), **given).reshape((rows, channels, *image))
        ]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """The columns of dY (its windows), by a convolution with one output channel per block element.

        UnsupportedError for parameters that are not known.
        """
        image, block = g.param("image_shape"), g.param("block_shape")
        if image is None or block is None:
            g.unsupported("image_shape and block_shape must be known to differentiate it")
        dy, count = g.dy(), prod(block)
        planes = dy.reshape((dy.shape[0] * dy.shape[1], 1, *image))
        places = g.writer.array(np.eye(count).reshape(count, 1, *block), dy.dtype)
        given = {name: g.attr(name) for name in ("dilations", "pads", "strides") if g.attr(name) is not None}
        return [planes.op("Conv", places, **given).reshape(g.x().shape)]


@register
class MaxUnpool(OpDef):
    """The partial inverse of MaxPool: elements of X are written to indices I of the flattened output; others are zero.

    The indices count in the default output shape, that of the smallest image whose pooling has the shape of X. A larger
    `output_shape` adds zeros at the end of the axes.
    """

    agreeing = True
    inputs = "X, I, output_shape?"
    outputs = "output"
    attrs = {"kernel_shape": Required("ints"), "pads": None, "strides": None}
    params = {"output_shape": 2}
    symbolic = ("output_shape",)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is None or len(x.shape) != len(c.attr("kernel_shape")) + 2:
            return [x] if x.shape is None else c.fail(f"X is {x}, expected rank {len(c.attr('kernel_shape')) + 2}")
        expect_shape(c, 1, x.shape)
        if c.has_param("output_shape"):
            given = c.param("output_shape")
            return [TensorType(x.dtype, tuple(given or (c.fresh_dim(f"d{i}") for i in range(len(x.shape)))))]
        return [TensorType(x.dtype, self._natural(c, x.shape))]

    def _natural(self, c: NodeView, shape: Sequence[Any]) -> tuple[Dim, ...]:
        """The shape of the smallest image whose pooling has `shape`, that of X: the default output shape."""
        window = window_of(c, c.attr("kernel_shape"))
        axes = zip(shape[2:], window.strides, window.kernel, window.pads or (), strict=True)
        return (*shape[:2], *((n - 1) * stride + kernel - sum(pads) for n, stride, kernel, pads in axes))

    def reference(self, c: Call, x: Array, indices: Array, *_: RuntimeValue) -> Array:
        natural: Any = self._natural(c, x.shape)
        if np.any((indices < 0) | (indices >= prod(natural))):
            c.fail(f"an index lies outside the {prod(natural)} elements of the output")
        flat = np.zeros(prod(natural), x.dtype)
        flat[indices.reshape(-1)] = x.reshape(-1)
        y = flat.reshape(natural)
        wanted = c.param("output_shape") or natural
        if any(size < own for size, own in zip(wanted, natural, strict=True)):
            c.fail(f"output_shape is {list(wanted)}, expected at least {list(natural)}")
        return np.pad(y, [(0, size - own) for size, own in zip(wanted, natural, strict=True)])

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """A ScatterElements into zeros. Negative indices, which MaxPool never returns, become indices out of range.

        UnsupportedError if it is not known by how much `output_shape` exceeds the default output shape.
        """
        x, indices, out = g.x(0), g.x(1).cast(DType.INT64), g.node.output.shape
        own = self._natural(g, x.shape)
        size = product(own)
        checked = (indices < 0).where(g.writer.extent(size), indices).reshape((x.value.tensor.size,))
        zeros = g.writer.fill(0, x.dtype, (size,))
        y = zeros.op("ScatterElements", checked, x.reshape((x.value.tensor.size,)), axis=0).reshape(own)
        more = [wanted - extent for wanted, extent in zip(out, own, strict=True)]
        if any(not isinstance(extra, int) or extra < 0 for extra in more):
            g.unsupported("output_shape is not known")
        return [y.pad([(0, extra) for extra in more])]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        x, dy = g.x(0), g.dy()
        own = self._natural(g, x.shape)
        inside = dy.pad([(0, size - more) for size, more in zip(own, dy.shape, strict=True)])
        return [inside.reshape((inside.value.tensor.size,)).gather(g.x(1))]


@register
class Det(OpDef):
    """The determinants of matrices in the last two axes."""

    agreeing = True
    inputs = "X"
    outputs = "Y"
    no_gradient = "it needs a matrix inverse, for which ONNX has no operator"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape = check_kind(c, 0, FLOAT), c.shape(0)
        square = shape is None or (len(shape) >= 2 and len({dim for dim in shape[-2:] if isinstance(dim, int)}) < 2)
        if not square:
            c.fail(f"X is {c.tensor(0)}, expected square matrices")
        return [TensorType(dtype, None if shape is None else shape[:-2])]

    def reference(self, c: Call, x: Array) -> Array:
        return np.asarray(np.linalg.det(as_computed(x))).astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        rank = len(c.shape(0) or ())
        return untouched_rows(c, axes, {rank - 1, rank - 2})
