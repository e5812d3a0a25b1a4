"""Depthwise convolutions of channels-last images: each channel has weights of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request
from lathe.core.kernels.conv.spec import Finish, extra_indices, finish_of, inplace_extras, is_covered, windows_of
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import traffic
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.target import Target

MOST_BYTES = 512  # places in a window of bytes: float32 holds sums of 512 products below 2^15 exactly
_WHOLE_LINE = Window(1, 1, 1, 1, 1, 0, 0)  # the vertical axis of a one-dimensional image


@dataclass(frozen=True)
class DepthwiseSpec(KernelSpec):
    """A register tile has `columns` adjacent results of one line, for one vector of channels.

    Bytes are multiplied as float32, which is exact for at most `MOST_BYTES` places. `fill` is the value of bytes
    outside the image.
    """

    family: ClassVar[str] = "depthwise"
    generator: ClassVar[str] = "depthwise.cpu"
    batch: Dim
    windows: tuple[Window, Window]  # lines, then columns
    channels: int
    finish: Finish
    columns: int
    lanes: int
    dtype: DType
    source: DType = DType.FLOAT32  # of the image
    fill: int = 0

    @property
    def taps(self) -> int:
        """The number of places in the window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        kind = f"{self.source} " if self.source.is_integer else ""
        return f"depthwise {kind}{kernel}, {self.columns} columns x {self.lanes} channels"


def depthwise(request: Request) -> KernelCall | None:
    """Selector of channels-last depthwise Conv and FusedConv over one or two axes, with constant weights.

    The types are float32, bfloat16 or float16 x float32, and uint8 x int8. None for other nodes, if an extent of the
    image, the result or the padding is not a number, if the epilogue has operators that are not elementwise, and for
    bytes if the window has more than `MOST_BYTES` (512) places.
    """
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not is_covered(node) or not is_depthwise(node, weight, windows):
        return None
    source = node.inputs[0].dtype if node.inputs[0] is not None else DType.FLOAT32
    if source.is_integer and weight[0].size > MOST_BYTES:
        return None
    fill = int(attribute(node, "pad_value")) if source.is_integer else 0
    channels, batch = weight.shape[0], node.output.shape[0]
    lines, columns = windows if len(windows) == 2 else (_WHOLE_LINE, windows[0])
    spec = DepthwiseSpec(
        batch, (lines, columns), channels, finish_of(node), columns_of(request.cpu, columns),
        min(request.cpu.lanes, 1 << (channels - 1).bit_length()), node.output.dtype, source, fill,
    )  # fmt: skip
    return KernelCall(
        spec,
        (In(0), Packed(1, f"depthwise{fill}", partial(pack, fill=fill)), *(In(i) for i in extra_indices(node)), Out(0)),
        inplace=inplace_extras(node),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )


def is_depthwise(node: Node, weight: Array, windows: tuple[Window, ...]) -> bool:
    """Whether each of several channels is convolved separately into one result channel, over one or two axes."""
    groups = int(attribute(node, "group"))
    return len(windows) <= 2 and groups > 1 and weight.shape[:2] == (groups, 1)


def pack(weight: Array, fill: int = 0) -> Array:
    """[C, 1, K...] as [K..., C] in float32; with a `fill`, followed by the sums of windows filled with it."""
    ordered = np.moveaxis(weight[:, 0], 0, -1).astype(np.float32)
    lines = ordered.reshape(-1, ordered.shape[-1])
    return np.concatenate([lines, fill * lines.sum(axis=0, keepdims=True)]) if fill else np.ascontiguousarray(ordered)


def columns_of(target: Target, window: Window) -> int:
    """The number of adjacent results per tile: at most 8 (4 with few registers), and at least 1.

    Registers must be left for a line of weights and of the image, and the windows must lie inside the image.
    """
    inside = window.inside[1] - window.inside[0]
    room = target.registers - window.kernel - 3
    return max(1, min(inside, room, 8 if target.registers >= 32 else 4))
