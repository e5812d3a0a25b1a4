"""Windows over images: MaxPool and AveragePool in either layout, any number of spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from core.ir.graph import Node
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.kernels.catalog.words import NARROW, computed_dtype

_FLOATS = NARROW | {DType.FLOAT32}
_DTYPES = {"MaxPool": _FLOATS | {DType.INT8, DType.UINT8}, "AveragePool": _FLOATS}


@dataclass(frozen=True, slots=True)
class Window:
    """The window's way along one spatial axis of `size` places, giving `count` results."""

    size: int
    count: int
    kernel: int
    stride: int
    dilation: int
    before: int  # padding
    after: int

    @property
    def inside(self) -> tuple[int, int]:
        """The results [first, last) whose whole window lies in the image."""
        reach = (self.kernel - 1) * self.dilation
        first = -(-self.before // self.stride)
        last = (self.size - 1 - reach + self.before) // self.stride + 1
        return min(first, self.count), max(min(first, self.count), min(last, self.count))


@dataclass(frozen=True)
class PoolSpec(KernelSpec):
    """Images [batch, spatial ..., channels]; planes of channels-first images are images of one channel."""

    family: ClassVar[str] = "pool"
    average: bool
    include_pad: bool  # padding counts in an average's divisor
    dtype: DType
    batch: Dim
    windows: tuple[Window, ...]
    channels: Dim
    pitches: tuple[Dim, Dim]  # elements from pixel to pixel, of the image and of the result

    @property
    def computed(self) -> DType:
        """The type in registers."""
        return computed_dtype(self.dtype)

    @property
    def taps(self) -> int:
        """Places in a window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        kind = "average" if self.average else "max"
        return f"{kind}pool({'x'.join(str(w.kernel) for w in self.windows)}, {self.channels} channels)"


@covers("MaxPool", "AveragePool")
def pool(request: Request) -> KernelCall | None:
    """None for the indices of MaxPool, unknown image sizes and other element types."""
    node = request.node
    x = node.inputs[0]
    if x is None or not has_plannable_types(node) or len(node.outputs) > 1 or x.dtype not in _DTYPES[node.op]:
        return None
    last = attribute(node, "layout") != "NCHW"  # batch-last, rows of the batch take the place of the channels
    spatial, results = (v.shape[1:-1] if last else v.shape[2:] for v in (x, node.output))
    windows = windows_of(node, spatial, results)
    if windows is None:
        return None
    batch, channels = (x.shape[0], x.shape[-1]) if last else (x.shape[0] * x.shape[1], 1)
    average = node.op == "AveragePool"
    pitches = (request.pitch(x), request.pitch(node.output)) if last else (1, 1)
    if pitches[0] is None or pitches[1] is None:
        return None
    padded = bool(attribute(node, "count_include_pad"))
    spec = PoolSpec(average, padded, x.dtype, batch, windows, channels, (pitches[0], pitches[1]))
    flops = node.output.tensor.size * prod(w.kernel for w in windows)
    strided = (In(0), Out()) if last else ()
    return KernelCall(spec, (In(0), Out()), strided=strided, flops=flops, bytes=traffic(node))


def windows_of(node: Node, spatial: Sequence[Dim], results: Sequence[Dim]) -> tuple[Window, ...] | None:
    """The windows of a pooling along its axes; None where sizes are not known."""
    kernel = integers(node, "kernel_shape")
    sizes = [size for size in (*spatial, *results) if isinstance(size, int)]
    if kernel is None or len(sizes) != 2 * len(kernel):
        return None
    rank = len(kernel)
    strides, dilations = (integers(node, name) or (1,) * rank for name in ("strides", "dilations"))
    pads = integers(node, "pads") or (0,) * (2 * rank)
    automatic = str(attribute(node, "auto_pad") or "NOTSET")
    columns = (sizes[:rank], sizes[rank:], kernel, strides, dilations, pads[:rank], pads[rank:])
    return tuple(_with_padding(Window(*facts), automatic) for facts in zip(*columns, strict=True))


def _with_padding(window: Window, automatic: str) -> Window:
    """The window with the padding that `auto_pad` asks for in place of the explicit one."""
    if automatic == "NOTSET":
        return window
    before = after = 0
    if automatic != "VALID":
        reach = (window.kernel - 1) * window.dilation + 1
        total = max((window.count - 1) * window.stride + reach - window.size, 0)
        small, large = total // 2, total - total // 2
        before, after = (small, large) if automatic == "SAME_UPPER" else (large, small)
    return Window(window.size, window.count, window.kernel, window.stride, window.dilation, before, after)
