"""Depthwise convolutions of channels-last images: every channel has a window of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

import numpy as np

from core.ir.graph import Array
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, covers
from core.kernels.catalog.conv import (
    Finish,
    extra_indices,
    finish_of,
    inplace_extras,
    is_covered,
    is_depthwise,
    windows_of,
)
from core.kernels.catalog.nest import traffic
from core.kernels.catalog.pool import Window
from core.kernels.target import Target

MOST_BYTES = 512  # places in a window of bytes: their products, below 2^15, add up to integers that float32 can hold
_WHOLE_LINE = Window(1, 1, 1, 1, 1, 0, 0)  # the vertical axis of a one-dimensional image


@dataclass(frozen=True)
class DepthwiseSpec(KernelSpec):
    """`columns` neighbouring results of one line are computed together, for one vector of channels at a time. Bytes are
    multiplied as float32, in which sums of so few are exact, and `fill` stands for those outside the image."""

    family: ClassVar[str] = "depthwise"
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
        """Places in the window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        kind = f"{self.source} " if self.source.is_integer else ""
        return f"depthwise {kind}{kernel}, {self.columns} columns x {self.lanes} channels"


@covers("FusedConv", "Conv")
def depthwise(request: Request) -> KernelCall | None:
    """For one- and two-dimensional images with as many groups as input and output channels."""
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


def pack(weight: Array, fill: int = 0) -> Array:
    """[C, 1, K...] as [K..., C], of float32. Behind them, where the image is filled up, what a window full of that adds
    up to."""
    ordered = np.moveaxis(weight[:, 0], 0, -1).astype(np.float32)
    lines = ordered.reshape(-1, ordered.shape[-1])
    return np.concatenate([lines, fill * lines.sum(axis=0, keepdims=True)]) if fill else np.ascontiguousarray(ordered)


def columns_of(target: Target, window: Window) -> int:
    """Results side by side: as many accumulators as leave registers for a line of weights and one of the image."""
    inside = window.inside[1] - window.inside[0]
    room = target.registers - window.kernel - 3
    return max(1, min(inside, room, 8 if target.registers >= 32 else 4))
