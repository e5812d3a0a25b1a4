"""Resize of images: each result is a weighted sum of a few places per axis, with weights known at compile time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import evaluate, symbols
from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.resize.image import changed_axes, channels_first, image_of, scales_of
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.ops.image.resize import Samples, samples_by_axis
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Call

_MOST_RESULTS = 1 << 16  # along an axis: wider than any image; a table of taps has an entry for each
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
    """Resize of float32 images [batch, planes, rows, columns, channels].

    `planes`, `rows` and `columns` are the taps of the results along these axes.
    """

    family: ClassVar[str] = "resize"
    generator: ClassVar[str] = "resize.cpu"
    batch: Dim
    planes: Taps
    rows: Taps
    columns: Taps
    channels: int

    @property
    def summary(self) -> str:
        taps = "x".join(str(axis.shape[1]) for axis in (self.planes, self.rows, self.columns) if axis.size > 1)
        return f"resize({taps or 1} taps, {self.channels} channels)"


def resize(request: Request) -> KernelCall | None:
    """Selector of Resize of float32 images of known size, in all modes, along the axes that `image_of` allows.

    None for other nodes, for parameters that only a run knows, if a result would lie outside the image and get the
    extrapolation value, for more than 65,536 results along a resized axis, and in dynamic-shape code.
    """
    node = request.node
    x = node.inputs[0]
    if x is None or not has_plannable_types(node) or x.dtype is not DType.FLOAT32:
        return None
    if any(value is not None for value in node.inputs[1:]) or not x.shape or 0 in x.shape:
        return None
    if any(symbols(dim) - _ONE.keys() for dim in x.shape):  # dynamic-shape code
        return None
    shape, result = (channels_first(node, value.shape) for value in (x, node.output))
    if not _has_small_tables(node, shape, result):
        return None
    samples = samples_by_axis(Call(registry.get(node.op), node, [], symbols=_ONE), [evaluate(d, _ONE) for d in shape])
    # An axis of extent n that is given the size 1 is resized, but not for n = 1.
    resized = [axis for axis, each in enumerate(samples) if each is not None or shape[axis] != result[axis]]
    image = image_of(node, resized)
    if image is None or any(each is not None and each.outside is not None for each in samples):
        return None
    sizes = [1 if axis is None else shape[axis] for axis in image.axes]
    planes, rows, columns = (
        _axis_taps(size, None if axis is None else samples[axis]) if isinstance(size, int) else None
        for axis, size in zip(image.axes, sizes, strict=True)
    )
    if planes is None or rows is None or columns is None:
        return None
    flops = node.output.tensor.size * (2 * prod(taps.shape[1] for taps in (planes, rows, columns)))
    spec = ResizeSpec(image.batch, planes, rows, columns, image.channels)
    return KernelCall(spec, (In(0), Out()), flops=flops, bytes=traffic(node))


def _has_small_tables(node: Node, shape: Sequence[Dim], result: Sequence[Dim]) -> bool:
    """Whether each axis that may be resized has at most `_MOST_RESULTS` results."""
    scales = scales_of(node, len(shape))
    crops = attribute(node, "coordinate_transformation_mode") == "tf_crop_and_resize"
    axes = range(len(shape)) if scales is None or crops else changed_axes(shape, result, scales)
    extents = [result[axis] for axis in axes]
    return all(extent <= _MOST_RESULTS for extent in extents if isinstance(extent, int))


def _axis_taps(size: int, samples: Samples | None) -> Taps:
    indices = np.arange(size)[:, None] if samples is None else samples.indices
    weights = np.ones(indices.shape) if samples is None or samples.weights is None else samples.weights
    return Taps(size, np.asarray(indices, np.int64), np.asarray(weights, np.float32))
