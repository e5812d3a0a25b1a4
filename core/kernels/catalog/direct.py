"""Convolutions of images with few channels into few channels, and the pooling that may follow.

Vectors over output channels would be mostly empty. Here they go along a line of the image instead, each channel apart;
a transpose in registers brings the results into channels-last order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from core.ir.graph import Array, Node
from core.ir.types import Dim
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch, covers
from core.kernels.catalog.conv import F32, Finish, extra_indices, finish_of, is_direct, windows_of
from core.kernels.catalog.nest import traffic
from core.kernels.catalog.pool import Window
from core.kernels.target import Target
from core.ops.conv import POOL_SIZE

_LINES = 2  # lines of results at once
_VECTORS = 2  # vectors along a line at once


@dataclass(frozen=True)
class DirectSpec(KernelSpec):
    """A task computes `band` lines of one image. It first copies the lines of the image that it needs, channel by
    channel and with the padding, into its scratch; `lines` x `vectors` x `together` accumulators are in registers."""

    family: ClassVar[str] = "direct"
    batch: Dim
    windows: tuple[Window, Window]  # counts are those before pooling
    channels: int
    outputs: int
    finish: Finish
    pool: str  # "", "max" or "average": see core.ops.conv.PooledConv
    lanes: int
    lines: int
    vectors: int
    together: int  # output channels
    band: int

    @property
    def step(self) -> int:
        """Lines and columns of the convolution for one of the result."""
        return POOL_SIZE if self.pool else 1

    @property
    def size(self) -> tuple[int, int]:
        """Lines and columns of the result."""
        lines, columns = (window.count // self.step for window in self.windows)
        return lines, columns

    @property
    def runs(self) -> int:
        """Vectors along a line of the convolution."""
        return -(-self.size[1] * self.step // self.lanes)

    @property
    def source_lines(self) -> int:
        """Lines of the padded image that a band needs."""
        lines = self.windows[0]
        return (self.band * self.step - 1) * lines.stride + (lines.kernel - 1) * lines.dilation + 1

    @property
    def source_width(self) -> int:
        """Columns of the padded image: as many as whole vectors of results read."""
        columns = self.windows[1]
        reach = (columns.kernel - 1) * columns.dilation
        return max(self.runs * self.lanes + reach, columns.before + columns.size)

    @property
    def source_elements(self) -> int:
        return self.channels * self.source_lines * self.source_width

    @property
    def result_width(self) -> int:
        """Room for one channel of a line of results; the last vector may be half full."""
        return (self.runs + 1) * self.lanes

    @property
    def result_lines(self) -> int:
        """Lines of the result that are computed at once."""
        return self.lines // self.step

    @property
    def scratch_elements(self) -> int:
        return self.source_elements + self.result_lines * self.outputs * self.result_width

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        pooled = f", {self.pool}pool {POOL_SIZE}x{POOL_SIZE}" if self.pool else ""
        return f"conv {kernel} direct {self.lines}x{self.vectors * self.lanes} columns x {self.together}{pooled}"


@covers("PooledConv", "FusedConv", "Conv")
def direct(request: Request) -> KernelCall | None:
    """For the convolutions that `core.kernels.catalog.conv.is_direct` picks."""
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not is_direct(node, weight):
        return None
    lines, columns = windows
    spec = _spec(node, weight, (_unpooled(lines), _unpooled(columns)), request.cpu)
    pixels = spec.windows[0].count * spec.windows[1].count
    return KernelCall(
        spec,
        (
            In(0),
            Packed(1, "direct", pack),
            *(In(i) for i in extra_indices(node)),
            Out(0),
            Scratch(spec.scratch_elements * F32.itemsize),
        ),
        flops=spec.batch * (pixels * 2 * weight.size),
        bytes=traffic(node),
    )


def pack(weight: Array) -> Array:
    """[O, I, K...] as [I, K..., O]."""
    return np.ascontiguousarray(np.moveaxis(weight, 0, -1))


def _spec(node: Node, weight: Array, windows: tuple[Window, Window], target: Target) -> DirectSpec:
    outputs, channels = weight.shape[:2]
    pool = str(attribute(node, "pool") or "") if node.op == "PooledConv" else ""
    vectors = max(1, min(_VECTORS, -(-windows[1].count // target.lanes)))
    most = (target.registers - 1) // (_LINES * vectors + 1)  # a weight of each channel, and a vector of the image
    together = -(-outputs // -(-outputs // most))
    spec = DirectSpec(
        node.output.shape[0], windows, channels, outputs, finish_of(node), pool,
        target.lanes, _LINES, vectors, together, _LINES,
    )  # fmt: skip
    return dataclasses.replace(spec, band=_band(spec, target))


def _band(spec: DirectSpec, target: Target) -> int:
    """Lines of a task: all of them while the copy of the image takes at most half of the nearest cache."""
    line = spec.channels * spec.source_width * spec.step * spec.windows[0].stride * F32.itemsize
    most = max(target.l1_bytes // 2 // line, spec.result_lines)
    wanted = min(most, spec.size[0])
    return max(-(-wanted // spec.result_lines), 1) * spec.result_lines


def _unpooled(window: Window) -> Window:
    """The window with the count of the convolution itself."""
    reach = (window.kernel - 1) * window.dilation + 1
    return dataclasses.replace(window, count=(window.size + window.before + window.after - reach) // window.stride + 1)
