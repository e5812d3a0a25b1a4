"""Gradients of convolutions: a transposed convolution for the image, the operator ConvWeightGradient for the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lathe.core.ir.graph import Array, Attr
from lathe.core.ir.types import Dim, TensorType, ValueType
from lathe.core.ops.nn.spatial import WINDOW_ATTRS, Pads, as_summed, first_shape, to_first, window_of, window_output
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, register
from lathe.core.ops.opdef.type_rules import agree, same_dtype

if TYPE_CHECKING:
    from lathe.core.ops.opdef.backward import Backward
    from lathe.core.ops.opdef.terms import Term


@register
class ConvWeightGradient(OpDef):
    """The gradient of a convolution with respect to its weight, [M, C/group, K1..].

    X (N, C, D1..) is the convolution's input, dY (N, M, O1..) the gradient with respect to its result.
    """

    domain = "lathe"
    inputs = "X, dY"
    outputs = "dW"
    attrs = {**WINDOW_ATTRS, "kernel_shape": Required("ints"), "group": 1, "layout": "NCHW"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, (0, 1))
        x, dy = first_shape(c, c.tensor(0).dims), first_shape(c, c.tensor(1).dims)
        kernel, group = c.attr("kernel_shape"), c.attr("group")
        found = window_output(c, window_of(c, kernel), x[2:])
        if not agree(c, found, dy[2:]):
            c.fail(f"dY is {c.tensor(1)}, expected results of spatial shape {list(found)}")
        return [TensorType(dtype, (dy[1], x[1] // group, *kernel))]

    def reference(self, c: Call, x: Array, dy: Array) -> Array:
        first, results = to_first(c, x), to_first(c, dy)
        window, group, out = window_of(c, c.attr("kernel_shape")), c.attr("group"), results.shape[2:]
        padded = window.padded(as_summed(first), out)
        n, m, pixels = len(results), results.shape[1], int(np.prod(out))
        rows = as_summed(results).reshape(n, group, m // group, pixels)
        dw = np.zeros((group, m // group, first.shape[1] // group, *window.kernel), rows.dtype)
        for tap, where in window.taps(out):
            seen = padded[where].reshape(n, group, first.shape[1] // group, pixels)
            dw[tap] = np.einsum("ngmp,ngcp->gmc", rows, seen)
        return dw.reshape(m, *dw.shape[2:]).astype(x.dtype, copy=False)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        attrs, kernel = shared_attrs(g), g.attr("kernel_shape")
        pads = explicit_pads(g, kernel, g.x(0).shape)
        dx = image_gradient(g.x(1), g.dy(), g.x(0).shape, attrs, pads)
        return [dx, g.x(0).op("Conv", g.dy(), **attrs, pads=flat_pads(pads))]


def shared_attrs(g: NodeView) -> dict[str, Attr]:
    """The attributes that a convolution shares with its gradients.

    `group` (1 by default), and `strides` and `dilations` where the node has them.
    """
    given = {name: g.attr(name) for name in ("strides", "dilations", "group")}
    return {name: value for name, value in given.items() if value is not None}


def explicit_pads(g: Infer, kernel: Sequence[int], shape: Sequence[Dim]) -> Pads:
    """The padding in numbers for an image of this shape, with `auto_pad` resolved.

    UnsupportedError if it depends on an unknown size, or for layouts other than channels first.
    """
    if g.attr("layout") != "NCHW":
        g.unsupported("only images with their channels first are differentiated")
    window = window_of(g, kernel)
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    if window.pads is None and len(sizes) < len(kernel):
        g.unsupported(f"its padding depends on the size of the image, {list(shape[2:])}, which must be known")
    return window.pads_for(sizes)


def flat_pads(pads: Pads) -> tuple[int, ...]:
    return (*(before for before, _ in pads), *(after for _, after in pads))


def image_gradient(dy: Term, w: Term, shape: Sequence[Dim], attrs: Mapping[str, Any], pads: Pads) -> Term:
    """The gradient of a convolution with respect to an image of this shape, from `dy` and the weight `w`.

    It is a transposed convolution. Pixels that no window reaches get zeros.
    """
    kernel = [extent for extent in w.shape[2:] if isinstance(extent, int)]
    ones = (1,) * len(kernel)
    strides, dilations = (attrs.get(name) or ones for name in ("strides", "dilations"))
    axes = zip(shape[2:], dy.shape[2:], kernel, strides, dilations, pads, strict=True)
    left = [
        size + (before + after) - ((count - 1) * stride + (k - 1) * dilation + 1)
        for size, count, k, stride, dilation, (before, after) in axes
    ]
    extra = tuple(more if isinstance(more, int) else 0 for more in left)
    dx = dy.op("ConvTranspose", w, **attrs, pads=flat_pads(pads), output_padding=extra)
    missing = [size - own for size, own in zip(shape[2:], dx.shape[2:], strict=True)]
    return dx.pad([(0, 0), (0, 0), *((0, more) for more in missing)])
