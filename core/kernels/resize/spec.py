"""Resize of images: each result is a weighted sum of a few rows and columns, with weights known at compile time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import evaluate, symbols
from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim, DType, Shape
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.ops.image.resize import Samples, samples_by_axis
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Call

_ONE = {"n": 1}  # the value of n for computing taps; axes whose size depends on the batch are not resampled


@dataclass(frozen=True, eq=False)
class Taps:
    """The taps of results along an axis of `size` places: indices (int64) and weights (float32), [results, taps]."""

    size: int
    indices: Array
    weights: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of results and of taps per result."""
        return self.indices.shape


@dataclass(frozen=True)
class ResizeSpec(KernelSpec):
    """Resize of float32 images [batch, height, width, channels], or [batch, height, width] if there is one channel.

    `rows` and `columns` are the taps of the results' lines and columns.
    """

    family: ClassVar[str] = "resize"
    generator: ClassVar[str] = "resize.cpu"
    batch: Dim
    rows: Taps
    columns: Taps
    channels: int

    @property
    def summary(self) -> str:
        return f"resize({self.rows.shape[1]}x{self.columns.shape[1]} taps, {self.channels} channels)"


def resize(request: Request) -> KernelCall | None:
    """Selector of Resize along the two spatial axes of float32 images of rank 4 and known size, in all modes.

    In channels-first images, each channel is an image of its own. None for other nodes, for parameters that only a run
    knows, and if a result would lie outside the image and get the extrapolation value.
    """
    node = request.node
    x = node.inputs[0]
    if x is None or not has_plannable_types(node) or x.dtype is not DType.FLOAT32 or len(x.shape) != 4:
        return None
    last = attribute(node, "layout") == "NHWC"
    before, after = (_channels_first(value.shape, last) for value in (x, node.output))
    extents = after[1:] if last else after[2:]
    if not all(isinstance(extent, int) for extent in extents) or before[:2] != after[:2] or 0 in before:
        return None
    if any(value is not None for value in node.inputs[1:]) or not all(isinstance(size, int) for size in before[2:]):
        return None
    if any(symbols(dim) - _ONE.keys() for dim in before):  # dynamic-shape code
        return None
    axes = _taps(node, [evaluate(dim, _ONE) for dim in before])
    if axes is None:
        return None
    inner = before[1] if last and isinstance(before[1], int) else 1
    spec = ResizeSpec(before[0] if last else before[0] * before[1], *axes, inner)
    flops = node.output.tensor.size * (2 * axes[0].shape[1] * axes[1].shape[1])
    return KernelCall(spec, (In(0), Out()), flops=flops, bytes=traffic(node))


def _channels_first(shape: Shape, last: bool) -> Shape:
    return (shape[0], shape[-1], *shape[1:-1]) if last else shape


def _taps(node: Node, shape: Sequence[int]) -> tuple[Taps, Taps] | None:
    """The taps along height and width of an image of `shape` [N, C, H, W].

    None if another axis changes, or a result gets the extrapolation value because it lies outside the image.
    """
    call = Call(registry.get(node.op), node, [], symbols=_ONE)
    n, c, rows, columns = samples_by_axis(call, shape)
    if n is not None or c is not None or any(s is not None and s.outside is not None for s in (rows, columns)):
        return None
    return _axis_taps(shape[2], rows), _axis_taps(shape[3], columns)


def _axis_taps(size: int, samples: Samples | None) -> Taps:
    indices = np.arange(size)[:, None] if samples is None else samples.indices
    weights = np.ones(indices.shape) if samples is None or samples.weights is None else samples.weights
    return Taps(size, np.asarray(indices, np.int64), np.asarray(weights, np.float32))
