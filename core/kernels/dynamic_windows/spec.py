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
from lathe.core.kernels.depthwise.spec import MOST_BYTES, pack
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
    """Windows over images [batch, spatial ..., channels] of type `dtype`.

    `kind` is "max", "average", "padded average" (the divisor counts padding), or "products": the sums of products with
    weights [window ..., channels]. Images are float32; those of maxima also int8 or uint8, those of products also
    uint8. Such products are computed in float32, which is exact for at most `MOST_BYTES` places; `fill` is the value of
    bytes outside the image.
    """

    family: ClassVar[str] = "open_windows"
    generator: ClassVar[str] = "dynamic_windows.cpu"
    kind: str
    batch: Dim
    windows: tuple[DynamicWindow, ...]
    channels: int
    finish: Finish | None  # of products
    dtype: DType = F32
    fill: int = 0

    @property
    def computed(self) -> DType:
        """The type of totals: float32 for products, otherwise that of the image."""
        return F32 if self.kind == "products" else self.dtype

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

    MaxPool may have images of int8 or uint8. It also takes channels-first float32 images of known size, if vectors can
    hold adjacent results. In other layouts the number of channels must be a number. None for other nodes, if generated
    code cannot compute a dimension, and for dynamic extents with `auto_pad` SAME_UPPER or SAME_LOWER.
    """
    node = request.node
    x, y, kernel = node.inputs[0], node.outputs[0], integers(node, "kernel_shape")
    if x is None or kernel is None or len(node.outputs) > 1 or not has_plannable_types(node):
        return None
    if x.dtype is not F32 and (node.op != "MaxPool" or x.dtype not in (DType.INT8, DType.UINT8)):
        return None
    last = attribute(node, "layout") != "NCHW"
    image, results = (value.shape[1:-1] if last else value.shape[2:] for value in (x, y))
    batch, channels = (x.shape[0], x.shape[-1]) if last else (x.shape[0] * x.shape[1], 1)
    windows = dynamic_windows_of(node, image, results, kernel)
    if windows is None or not isinstance(channels, int):
        return None
    in_rows = not last and x.dtype is F32 and windows[-1].has_vectors(request.cpu)
    if not any(map(has_only_sizes, (*image, *results))) and not in_rows:
        return None
    kind = "max" if node.op == "MaxPool" else "padded average" if attribute(node, "count_include_pad") else "average"
    spec = DynamicWindowsSpec(kind, batch, windows, channels, None, x.dtype)
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
    """Selector of channels-last depthwise Conv and FusedConv with constant weights, one result per channel.

    Images are float32, or uint8 with int8 weights. At least one spatial extent of the image or the result is dynamic.
    None for other nodes, if generated code cannot compute a dimension, if the padding is not known, if the epilogue has
    operators that are not elementwise, and for bytes if the window has more than `MOST_BYTES` (512) places.
    """
    node, weight = request.node, request.constant(1)
    if weight is None or not has_plannable_types(node) or not is_covered(node) or not _is_depthwise(node):
        return None
    x, y = node.inputs[0], node.output
    pads = conv_pads(Infer(registry.get(node.op), node, {}))
    if x is None or pads is None or weight.shape[:2] != (int(attribute(node, "group")), 1):
        return None
    types = x.dtype, node.required_input(1).dtype
    if types not in ((F32, F32), (DType.UINT8, DType.INT8)):
        return None
    is_bytes = x.dtype is not F32
    if is_bytes and weight[0].size > MOST_BYTES:
        return None
    fill = int(attribute(node, "pad_value")) if is_bytes and node.op == "FusedConv" else 0
    image, results = x.shape[1:-1], y.shape[1:-1]
    if not any(map(has_only_sizes, (*image, *results))):
        return None
    strides, dilations = (attribute(node, name) or (1,) * len(image) for name in ("strides", "dilations"))
    facts = zip(image, results, weight.shape[2:], strides, dilations, pads, strict=True)
    windows = tuple(DynamicWindow(*each, *pad) for *each, pad in facts)
    spec = DynamicWindowsSpec("products", x.shape[0], windows, len(weight), finish_of(node), x.dtype, fill)
    operands: tuple[Operand, ...] = (
        In(0),
        Packed(1, f"depthwise{fill}", partial(pack, fill=fill)),
        *(In(i) for i in extra_indices(node)),
        Out(0),
    )
    return KernelCall(
        spec, operands, inplace=inplace_extras(node), flops=y.tensor.size * (2 * spec.taps), bytes=traffic(node)
    )


def _is_depthwise(node: Node) -> bool:
    x = node.inputs[0]
    return x is not None and int(attribute(node, "group")) > 1 and x.shape[-1] == attribute(node, "group")
