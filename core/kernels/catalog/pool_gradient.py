"""The gradient of MaxPool where windows do not overlap, the common case: every place gets one number or zero."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic

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


@covers("MaxPoolGradient")
def pool_gradient(request: Request) -> KernelCall | None:
    """None for channels-first images, and for windows that overlap, leave gaps or reach beyond the image."""
    node = request.node
    x, dy = node.inputs
    layout, kernel = attribute(node, "layout"), integers(node, "kernel_shape") or ()
    if x is None or dy is None or not has_plannable_types(node) or x.dtype is not F32 or len(x.shape) != 4:
        return None
    batch, height, width, channels = x.shape
    known = [extent for extent in (height, width, channels, *dy.shape[1:3]) if isinstance(extent, int)]
    if layout == "NCHW" or len(known) < 5 or not _tiles(request, kernel):
        return None
    size, count = (known[0], known[1]), (known[3], known[4])
    if any(n * k > extent for n, k, extent in zip(count, kernel, size, strict=True)):
        return None
    spec = PoolGradientSpec(batch, size, count, (kernel[0], kernel[1]), known[2])
    return KernelCall(spec, (In(0), In(1), Out()), flops=dy.tensor.size * (2 * prod(kernel)), bytes=traffic(node))


def _tiles(request: Request, kernel: tuple[int, ...]) -> bool:
    """Whether windows stand side by side."""
    node = request.node
    strides, dilations = (integers(node, name) or (1, 1) for name in ("strides", "dilations"))
    padded = any(integers(node, "pads") or ()) or attribute(node, "auto_pad") not in (None, "", "NOTSET", "VALID")
    return strides == kernel and dilations == (1, 1) and not padded
