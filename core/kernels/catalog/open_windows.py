"""Windows over images whose extents are sizes of a table: MaxPool, AveragePool and depthwise convolutions; and pools
of images with their channels first, whatever their sizes.

Every window is cut to what it has in common with the image, so no size has to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

from core.ir.dim import product
from core.ir.dims import is_sized
from core.ir.graph import Node
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, covers
from core.kernels.catalog.conv import Finish, extra_indices, finish_of, inplace_extras, is_covered
from core.kernels.catalog.depthwise import pack
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.kernels.catalog.pool import windows_of
from core.kernels.target import Target
from core.ops import registry
from core.ops.conv import conv_pads
from core.ops.registry import Infer

F32 = DType.FLOAT32
MOST_UNROLLED = 16  # taps along the last axis


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """The window's way along an axis of `size` places, giving `count` results."""

    size: Dim
    count: Dim
    kernel: int
    stride: int
    dilation: int
    before: int  # padding
    after: int

    def has_vectors(self, target: Target) -> bool:
        """Whether neighbouring results of images of one channel are vectors: their taps are unrolled, and each lies in
        one of two vectors that follow one another."""
        return self.kernel <= MOST_UNROLLED and (self.kernel - 1) * self.dilation // self.stride <= target.lanes


@dataclass(frozen=True)
class OpenWindowsSpec(KernelSpec):
    """Float32 images [batch, spatial ..., channels]. `kind`: "max", "average", "padded average", whose divisor counts
    the padding, or "products", the sums of products with weights [window ..., channels]."""

    family: ClassVar[str] = "open_windows"
    kind: str
    batch: Dim
    windows: tuple[OpenWindow, ...]
    channels: int
    finish: Finish | None  # of products

    @property
    def pixels(self) -> Dim:
        """Results of the whole batch, for each channel."""
        return product((self.batch, *(window.count for window in self.windows)))

    @property
    def taps(self) -> int:
        """Places in a window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        return f"{self.kind} of {'x'.join(str(window.kernel) for window in self.windows)}, {self.channels} channels"


@covers("MaxPool", "AveragePool", first=True)
def open_pool(request: Request) -> KernelCall | None:
    """None for the indices of MaxPool, where channels are no number, and where a kernel of known sizes does as well."""
    node = request.node
    x, y, kernel = node.inputs[0], node.outputs[0], integers(node, "kernel_shape")
    if x is None or kernel is None or len(node.outputs) > 1 or not has_plannable_types(node) or x.dtype is not F32:
        return None
    last = attribute(node, "layout") != "NCHW"
    image, results = (value.shape[1:-1] if last else value.shape[2:] for value in (x, y))
    batch, channels = (x.shape[0], x.shape[-1]) if last else (x.shape[0] * x.shape[1], 1)
    windows = open_windows_of(node, image, results, kernel)
    if windows is None or not isinstance(channels, int):
        return None
    if not any(map(is_sized, (*image, *results))) and (last or not windows[-1].has_vectors(request.cpu)):
        return None
    kind = "max" if node.op == "MaxPool" else "padded average" if attribute(node, "count_include_pad") else "average"
    spec = OpenWindowsSpec(kind, batch, windows, channels, None)
    return KernelCall(spec, (In(0), Out()), flops=y.tensor.size * spec.taps, bytes=traffic(node))


def open_windows_of(
    node: Node, image: Sequence[Dim], results: Sequence[Dim], kernel: tuple[int, ...]
) -> tuple[OpenWindow, ...] | None:
    """The windows of a pool; None for padding that follows from a size that is not known."""
    if (known := windows_of(node, image, results)) is not None:
        return tuple(OpenWindow(w.size, w.count, w.kernel, w.stride, w.dilation, w.before, w.after) for w in known)
    if str(attribute(node, "auto_pad") or "NOTSET") not in ("NOTSET", "VALID"):
        return None
    pads = integers(node, "pads") or (0,) * (2 * len(kernel))
    strides, dilations = (integers(node, name) or (1,) * len(kernel) for name in ("strides", "dilations"))
    facts = zip(image, results, kernel, strides, dilations, pads[: len(kernel)], pads[len(kernel) :], strict=True)
    return tuple(OpenWindow(*each) for each in facts)


@covers("FusedConv", "Conv", first=True)
def open_depthwise(request: Request) -> KernelCall | None:
    """Convolutions with as many groups as input and output channels."""
    node, weight = request.node, request.constant(1)
    if weight is None or not has_plannable_types(node) or not is_covered(node) or not _is_depthwise(node):
        return None
    x, y = node.inputs[0], node.output
    pads = conv_pads(Infer(registry.get(node.op), node, {}))
    if x is None or x.dtype is not F32 or pads is None or weight.shape[:2] != (int(attribute(node, "group")), 1):
        return None
    image, results = x.shape[1:-1], y.shape[1:-1]
    if not any(map(is_sized, (*image, *results))):
        return None
    strides, dilations = (attribute(node, name) or (1,) * len(image) for name in ("strides", "dilations"))
    facts = zip(image, results, weight.shape[2:], strides, dilations, pads, strict=True)
    windows = tuple(OpenWindow(*each, *pad) for *each, pad in facts)
    spec = OpenWindowsSpec("products", x.shape[0], windows, len(weight), finish_of(node))
    operands: tuple[Operand, ...] = (
        In(0),
        Packed(1, "depthwise0", partial(pack, fill=0)),
        *(In(i) for i in extra_indices(node)),
        Out(0),
    )
    return KernelCall(
        spec, operands, inplace=inplace_extras(node), flops=y.tensor.size * (2 * spec.taps), bytes=traffic(node)
    )


def _is_depthwise(node: Node) -> bool:
    x = node.inputs[0]
    return x is not None and int(attribute(node, "group")) > 1 and x.shape[-1] == attribute(node, "group")
