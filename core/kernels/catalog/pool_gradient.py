"""The gradient of MaxPool: where windows do not overlap every place gets one number or zero, else they add up."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.kernels.catalog.pool import Window, windows_of

F32 = DType.FLOAT32


@dataclass(frozen=True)
class PoolGradientSpec(KernelSpec):
    """Images [batch, H, W, channels] in windows of `kernel`; channels may as well be the rows of batch-last images."""

    family: ClassVar[str] = "pool_gradient"
    batch: Dim
    size: tuple[int, int]
    count: tuple[int, int]
    kernel: tuple[int, int]
    channels: int

    @property
    def covered(self) -> bool:
        """Whether every place lies in a window."""
        return all(n * k == size for n, k, size in zip(self.count, self.kernel, self.size, strict=True))

    @property
    def summary(self) -> str:
        return f"maxpool gradient({self.kernel[0]}x{self.kernel[1]}, {self.channels} channels)"


@dataclass(frozen=True)
class PoolSumSpec(KernelSpec):
    """The same for windows of any kind: a task is an image, whose windows add what they give one after the other."""

    family: ClassVar[str] = "pool_sum"
    batch: Dim
    windows: tuple[Window, ...]
    channels: int

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        return f"maxpool gradient({kernel}, overlapping, {self.channels} channels)"


@covers("MaxPoolGradient")
def pool_gradient(request: Request) -> KernelCall | None:
    """None for channels-first images, other element types, and sizes that are not known."""
    node = request.node
    x, dy = node.inputs
    if x is None or dy is None or not has_plannable_types(node) or x.dtype is not F32 or len(x.shape) < 3:
        return None
    windows = windows_of(node, x.shape[1:-1], dy.shape[1:-1])
    batch, *_, channels = x.shape
    if attribute(node, "layout") == "NCHW" or windows is None or not isinstance(channels, int):
        return None
    flops = dy.tensor.size * (2 * prod(window.kernel for window in windows))
    return KernelCall(_spec(batch, windows, channels), (In(0), In(1), Out()), flops=flops, bytes=traffic(node))


def _spec(batch: Dim, windows: tuple[Window, ...], channels: int) -> KernelSpec:
    if len(windows) != 2 or not all(map(_stands_alone, windows)):
        return PoolSumSpec(batch, windows, channels)
    lines, columns = windows
    kernel = (lines.kernel, columns.kernel)
    return PoolGradientSpec(batch, (lines.size, columns.size), (lines.count, columns.count), kernel, channels)


def _stands_alone(window: Window) -> bool:
    """Whether windows stand side by side, all inside the image."""
    apart = window.stride == window.kernel and window.dilation == 1 and window.before == 0
    return apart and window.count * window.kernel <= window.size
