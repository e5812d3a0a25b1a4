"""The gradient of MaxPool: one kernel for windows that do not overlap, one that adds up overlapping windows."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.shared.window import Window, windows_of

F32 = DType.FLOAT32


@dataclass(frozen=True)
class PoolGradientSpec(KernelSpec):
    """The gradient of MaxPool on images [batch, H, W, channels] with adjacent windows of `kernel` that do not overlap.

    `size` are H and W, `count` the numbers of windows along them. For batch-last images, the batch rows take the place
    of the channels.
    """

    family: ClassVar[str] = "pool_gradient"
    generator: ClassVar[str] = "pool.gradient_cpu"
    batch: Dim
    size: tuple[int, int]
    count: tuple[int, int]
    kernel: tuple[int, int]
    channels: int

    @property
    def covered(self) -> bool:
        """Whether every pixel of the image lies in a window."""
        return all(n * k == size for n, k, size in zip(self.count, self.kernel, self.size, strict=True))

    @property
    def summary(self) -> str:
        return f"maxpool gradient({self.kernel[0]}x{self.kernel[1]}, {self.channels} channels)"


@dataclass(frozen=True)
class PoolSumSpec(KernelSpec):
    """The gradient of MaxPool for any windows: a task is an image, whose windows are added one after the other."""

    family: ClassVar[str] = "pool_sum"
    generator: ClassVar[str] = "pool.sum_cpu"
    batch: Dim
    windows: tuple[Window, ...]
    channels: int

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        return f"maxpool gradient({kernel}, overlapping, {self.channels} channels)"


def pool_gradient(request: Request) -> KernelCall | None:
    """Selector of MaxPoolGradient of float32 images in layouts other than channels-first.

    None for other nodes, and if a spatial extent or the number of channels is not a number.
    """
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
    if len(windows) != 2 or not all(map(_is_tiling, windows)):
        return PoolSumSpec(batch, windows, channels)
    lines, columns = windows
    kernel = (lines.kernel, columns.kernel)
    return PoolGradientSpec(batch, (lines.size, columns.size), (lines.count, columns.count), kernel, channels)


def _is_tiling(window: Window) -> bool:
    """Whether windows along this axis are adjacent, do not overlap, and lie inside the image, from its start on."""
    apart = window.stride == window.kernel and window.dilation == 1 and window.before == 0
    return apart and window.count * window.kernel <= window.size
