"""Convolutions of images with few input and output channels, and the pooling that may follow.

Vectors over output channels would be mostly empty. Here vectors run along a line of the image instead, one channel at a
time; a transpose in registers brings the results into channels-last order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch
from lathe.core.kernels.conv.spec import (
    F32,
    Finish,
    extra_indices,
    finish_of,
    has_long_epilogue,
    is_covered,
    windows_of,
)
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import traffic
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.conv import POOL_SIZE, has_few_channels
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView

_LINES = 2  # lines of results per register tile
_VECTORS = 2  # vectors along a line per register tile


@dataclass(frozen=True)
class DirectSpec(KernelSpec):
    """A task computes `band` lines of the result of one image.

    The task first copies the image lines that it needs to scratch, channel by channel and with padding. A register tile
    has `lines` x `vectors` x `together` accumulators.
    """

    family: ClassVar[str] = "direct"
    generator: ClassVar[str] = "direct.cpu"
    batch: Dim
    windows: tuple[Window, Window]  # counts are those before pooling
    channels: int
    outputs: int
    finish: Finish
    pool: str  # "", "max" or "average": see lathe.core.ops.nn.conv.PooledConv
    lanes: int
    lines: int
    vectors: int
    together: int  # output channels
    band: int

    @property
    def step(self) -> int:
        """Lines, and columns, of the convolution per line, or column, of the result."""
        return POOL_SIZE if self.pool else 1

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of lines and columns of the result."""
        lines, columns = (window.count // self.step for window in self.windows)
        return lines, columns

    @property
    def runs(self) -> int:
        """The number of vectors along a line of the convolution."""
        return -(-self.size[1] * self.step // self.lanes)

    @property
    def source_lines(self) -> int:
        """The number of padded image lines that a band needs."""
        lines = self.windows[0]
        return (self.band * self.step - 1) * lines.stride + (lines.kernel - 1) * lines.dilation + 1

    @property
    def source_width(self) -> int:
        """The number of columns of the padded image: those that whole vectors of results read."""
        columns = self.windows[1]
        reach = (columns.kernel - 1) * columns.dilation
        return max(self.runs * self.lanes + reach, columns.before + columns.size)

    @property
    def source_elements(self) -> int:
        return self.channels * self.source_lines * self.source_width

    @property
    def result_width(self) -> int:
        """Elements of scratch for one channel of a line of results; the last vector may be half full."""
        return (self.runs + 1) * self.lanes

    @property
    def result_lines(self) -> int:
        """The number of result lines that are computed at once."""
        return self.lines // self.step

    @property
    def scratch_elements(self) -> int:
        return self.source_elements + self.result_lines * self.outputs * self.result_width

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        pooled = f", {self.pool}pool {POOL_SIZE}x{POOL_SIZE}" if self.pool else ""
        return f"conv {kernel} direct {self.lines}x{self.vectors * self.lanes} columns x {self.together}{pooled}"


def direct(request: Request) -> KernelCall | None:
    """Selector of channels-last float32 Conv, FusedConv and PooledConv from at most 4 channels to at most 8.

    The convolution is 2-D and has constant weights, no groups, a kernel of 2 to 11 columns and a horizontal stride of
    1. None for other nodes, if an extent of the image or the padding is not a number, and if the epilogue is long
    (except in PooledConv) or has extra inputs that differ by pixel: see `suits_direct`.
    """
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not suits_direct(node, weight):
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


def suits_direct(node: Node, weight: Array) -> bool:
    """Whether vectors should run along the lines of an image.

    That is for float32 with few input and output channels, if the epilogue's extra inputs are the same for all pixels,
    and the epilogue is short or belongs to a PooledConv.
    """
    if not has_few_channels(NodeView(registry.get(node.op), node), weight.shape) or not is_covered(node):
        return False
    extras = [node.required_input(i).shape for i in extra_indices(node)]
    alike = all(extent == 1 for shape in extras for extent in shape[:-1])
    if node.required_input(0).dtype is not F32 or node.output.dtype is not F32:
        return False
    return alike and (node.op == "PooledConv" or not has_long_epilogue(node))


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
    """Lines per task, a multiple of `result_lines`: enough for the whole image, or fewer.

    Fewer if the copy of the image would exceed half of the first-level cache.
    """
    line = spec.channels * spec.source_width * spec.step * spec.windows[0].stride * F32.itemsize
    most = max(target.l1_bytes // 2 // line, spec.result_lines)
    wanted = min(most, spec.size[0])
    return max(-(-wanted // spec.result_lines), 1) * spec.result_lines


def _unpooled(window: Window) -> Window:
    """The window with `count` replaced by the number of results before pooling."""
    reach = (window.kernel - 1) * window.dilation + 1
    return dataclasses.replace(window, count=(window.size + window.before + window.after - reach) // window.stride + 1)
