"""Sliding windows of pooling, convolutions, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lathe.core.ir.graph import Node
from lathe.core.ir.types import Dim
from lathe.core.kernels.shared.attributes import attribute, integers


@dataclass(frozen=True, slots=True)
class Window:
    """The geometry of a sliding window along one spatial axis: `size` input places, `count` results."""

    size: int
    count: int
    kernel: int
    stride: int
    dilation: int
    before: int  # padding
    after: int

    @property
    def inside(self) -> tuple[int, int]:
        """The range [first, last) of results whose window lies completely inside the image; may be empty."""
        reach = (self.kernel - 1) * self.dilation
        first = -(-self.before // self.stride)
        last = (self.size - 1 - reach + self.before) // self.stride + 1
        return min(first, self.count), max(min(first, self.count), min(last, self.count))


def windows_of(node: Node, spatial: Sequence[Dim], results: Sequence[Dim]) -> tuple[Window, ...] | None:
    """The window along each spatial axis of a node with a `kernel_shape`: a pool, or the gradient of one.

    The weight gradient of a convolution is such a node, too. `spatial` are the extents of the image, `results` those of
    the results. None unless all extents are numbers and the node has a `kernel_shape`.
    """
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
    """The window with its padding replaced by that of ONNX's `auto_pad`; unchanged for NOTSET."""
    if automatic == "NOTSET":
        return window
    before = after = 0
    if automatic != "VALID":
        reach = (window.kernel - 1) * window.dilation + 1
        total = max((window.count - 1) * window.stride + reach - window.size, 0)
        small, large = total // 2, total - total // 2
        before, after = (small, large) if automatic == "SAME_UPPER" else (large, small)
    return Window(window.size, window.count, window.kernel, window.stride, window.dilation, before, after)
