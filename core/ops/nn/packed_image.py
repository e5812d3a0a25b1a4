"""PackImage: the layout in which convolutions on a GPU read images of few channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.dim import floor_div
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.nn.spatial import first_shape, to_first
from lathe.core.ops.opdef.numeric import convert
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, register
from lathe.core.ops.opdef.type_rules import as_dtype, shape_text


@register
class PackImage(OpDef):
    """Images with their channels last, `block` x `block` pixels as one, and channels of zeros added up to `channels`.

    Y[n, i, j, (r * block + c) * channels + k] = X[n, k, block * i + r, block * j + c], or 0 if X has no channel k.
    X is float[N, C, H, W], or float[N, H, W, C] if `layout` is "NHWC"; `block` divides H and W. Y has the element type
    `to`, or that of X.
    """

    domain = "lathe"
    inputs = "X"
    outputs = "Y"
    attrs = {"channels": Required("number"), "block": 1, "to": None, "layout": "NCHW"}
    no_gradient = "only passes emit it, after differentiation"

    def target(self, c: NodeView, dtype: DType) -> DType:
        """The element type of Y for an X of `dtype`."""
        to = c.attr("to")
        return dtype if to is None else as_dtype(c, to)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        channels, block, text = c.attr("channels"), c.attr("block"), shape_text(c.shape(0))
        n, own, *sizes = first_shape(c, c.tensor(0).dims)
        if len(sizes) != 2 or not isinstance(own, int) or own > channels:
            c.fail(f"X has shape {text}, expected rank 4 and at most {channels} channels")
        if block > 1 and any(not isinstance(size, int) or size % block for size in sizes):
            c.fail(f"X has shape {text}, expected a height and width that {block} divides")
        counts = [floor_div(size, block) for size in sizes]
        return [TensorType(self.target(c, c.dtype(0)), (n, *counts, channels * block * block))]

    def reference(self, c: Call, x: Array) -> Array:
        channels, block = c.attr("channels"), c.attr("block")
        images = to_first(c, x)
        n, own, h, w = images.shape
        padded = np.pad(images, ((0, 0), (0, channels - own), (0, 0), (0, 0)))
        apart = padded.reshape(n, channels, h // block, block, w // block, block)
        packed = apart.transpose(0, 2, 4, 3, 5, 1).reshape(n, h // block, w // block, block * block * channels)
        to = c.attr("to")
        return packed if to is None else convert(packed, as_dtype(c, to), saturate=True, round_mode="up")
