"""MaxPool, AveragePool and depthwise convolutions over images with dynamic extents, and pools of channels-first images.

Each window is clipped to the image at run time, so no size must be known at compile time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request
from lathe.core.kernels.conv.spec import Finish, extra_indices, finish_of, inplace_extras, is_covered
from lathe.core.kernels.depthwise.spec import pack
from lathe.core.kernels.shared.attributes import attribute, integers
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.shared.window import windows_of
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.conv import conv_pads
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer

F32 = DType.FLOAT32
MOST_UNROLLED = 16  # taps along the last axis, up to which they are unrolled


@dataclass(frozen=True, slots=True)
class DynamicWindow:
    """The geometry of a sliding window along an axis of `size` places, with `count` results."""

    size: Dim
    count: Dim
    kernel: int
    stride: int
    dilation: int
    before: int  # padding
    after: int

    def has_vectors(self, target: Target) -> bool:
        """Whether vectors can hold adjacent results of images of one channel.

        The taps must be few enough to be unrolled, and each must lie in one of two successive vectors.
        """
        return self.kernel <= MOST_UNROLLED and (self.kernel - 1) * self.dilation // self.stride <= target.lanes


@dataclass(frozen=True)
class DynamicWindowsSpec(KernelSpec):
    """Windows over float32 images [batch, spatial ..., channels].

    `kind` is "max", "average", "padded average" (the divisor counts padding), or "products": the sums of products with
    weights [window ..., channels].
    """

    family: ClassVar[str] = "open_windows"
    generator: ClassVar[str] = "dynamic_windows.cpu"
    kind: str
    batch: Dim
    windows: tuple[DynamicWindow, ...]
    channels: int
    finish: Finish | None  # of products

    @property
    def pixels(self) -> Dim:
        """The number of results of the whole batch per channel."""
        return product((self.batch, *(window.count for window in self.windows)))

    @property
    def taps(self) -> int:
        """The number of places in a window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        return f"{self.kind} of {'x'.join(str(window.kernel) for window in self.windows)}, {self.channels} channels"


def dynamic_pool(request: Request) -> KernelCall | None:
    """Selector of MaxPool without indices and AveragePool of float32 images with dynamic extents.

    It also takes channels-first images of known size, if vectors can hold adjacent results. In other layouts the number
    of channels must be a number. None for other nodes, if generated code cannot compute a dimension, and for dynamic
    extents with `auto_pad` SAME_UPPER or SAME_LOWER.
    """
    node = request.node
    x, y, kernel = node.inputs[0], node.outputs[0], integers(node, "kernel_shape")
    if x is None or kernel is None or len(node.outputs) > 1 or not has_plannable_types(node) or x.dtype is not F32:
        return None
    last = attribute(node, "layout") != "NCHW"
    image, results = (value.shape[1:-1] if last else value.shape[2:] for value in (x, y))
    batch, channels = (x.shape[0], x.shape[-1]) if last else (x.shape[0] * x.shape[1], 1)
    windows = dynamic_windows_of(node, image, results, kernel)
    if windows is None or not isinstance(channels, int):
        return None
    if not any(map(has_only_sizes, (*image, *results))) and (last or not windows[-1].has_vectors(request.cpu)):
        return None
    kind = "max" if node.op == "MaxPool" else "padded average" if attribute(node, "count_include_pad") else "average"
    spec = DynamicWindowsSpec(kind, batch, windows, channels, None)
    return KernelCall(spec, (In(0), Out()), flops=y.tensor.size * spec.taps, bytes=traffic(node))


def dynamic_windows_of(
    node: Node, image: Sequence[Dim], results: Sequence[Dim], kernel: tuple[int, ...]
) -> tuple[DynamicWindow, ...] | None:
    """The windows of a pool along each spatial axis, for an image and results of these extents.

    None if `auto_pad` is SAME_UPPER or SAME_LOWER and an extent is dynamic.
    """
    if (known := windows_of(node, image, results)) is not None:
        return tuple(DynamicWindow(w.size, w.count, w.kernel, w.stride, w.dilation, w.before, w.after) for w in known)
    if str(attribute(node, "auto_pad") or "NOTSET") not in ("NOTSET", "VALID"):
        return None
    pads = integers(node, "pads") or (0,) * (2 * len(kernel))
    strides, dilations = (integers(node, name) or (1,) * len(kernel) for name in ("strides", "dilations"))
    facts = zip(image, results, kernel, strides, dilations, pads[: len(kernel)], pads[len(kernel) :], strict=True)
    return tuple(DynamicWindow(*each) for each in facts)


def dynamic_depthwise(request: Request) -> KernelCall | None:
    """Selector of channels-last float32 depthwise Conv and FusedConv with constant weights, one result per channel.

    At least one spatial extent of the image or the result is dynamic. None for other nodes, if generated code cannot
    compute a dimension, if the padding is not known, and if the epilogue has operators that are not elementwise.
    """
    node, weight = request.node, request.constant(1)
    if weight is None or not has_plannable_types(node) or not is_covered(node) or not _is_depthwise(node):
        return None
    x, y = node.inputs[0], node.output
    pads = conv_pads(Infer(registry.get(node.op), node, {}))
    if x is None or x.dtype is not F32 or pads is None or weight.shape[:2] != (int(attribute(node, "group")), 1):
        return None
    image, results = x.shape[1:-1], y.shape[1:-1]
    if not any(map(has_only_sizes, (*image, *results))):
        return None
    strides, dilations = (attribute(node, name) or (1,) * len(image) for name in ("strides", "dilations"))
    facts = zip(image, results, weight.shape[2:], strides, dilations, pads, strict=True)
    windows = tuple(DynamicWindow(*each, *pad) for *each, pad in facts)
    spec = DynamicWindowsSpec("products", x.shape[0], windows, len(weight), finish_of(node))
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
