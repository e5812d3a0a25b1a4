"""Interpolated sampling: GridSample, RoiAlign, DeformConv.

Positions are in pixels; 0 is the centre of the first pixel. A sample is a weighted sum of pixels. For each axis it has
taps: pairs of indices and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import isfinite, prod
from typing import Any, TypeAlias

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.nn.spatial import fresh_spatial, kernel_of, window_of, window_output
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import FLOAT, Shape, as_computed, check_kind, expect_shape

Taps: TypeAlias = list[tuple[Any, Any]]  # (integer positions, possibly outside; weights), of the samples' shape

_PADDINGS = ("zeros", "border", "reflection")
_CUBIC_A = -0.75
MOST_SAMPLES = 4096  # the most samples along one axis of a region: the pixels of a large image


def linear_taps(x: Any) -> Taps:
    low = np.floor(x)
    return [(low, 1 - (x - low)), (low + 1, x - low)]


def _nearest_taps(x: Any) -> Taps:
    return [(np.rint(x), np.ones_like(x))]


def _cubic_taps(x: Any) -> Taps:
    """The four neighbours of each position and their weights, by cubic convolution (R. Keys, 1981, equation 4)."""
    low, a = np.floor(x), _CUBIC_A
    taps = []
    for shift in range(-1, 3):
        d = np.abs(x - (low + shift))
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        taps.append((low + shift, np.where(d <= 1, near, far)))
    return taps


_MODES = {"linear": linear_taps, "nearest": _nearest_taps, "cubic": _cubic_taps}


def gather(x: Any, taps: Sequence[Taps]) -> Any:
    """Samples [N, C, O..] of images x [N, C, D..], from the taps of each image axis, of shape [N, O..].

    Pixels outside the image count as zero.
    """
    last = np.moveaxis(x, 1, -1)
    shape = taps[0][0][0].shape
    image = np.arange(len(x)).reshape(-1, *(1,) * (len(shape) - 1))
    total = np.zeros((*shape, x.shape[1]), x.dtype)
    for combination in product(*taps):
        weight: Any = np.ones(shape, x.dtype)
        index = [image]
        for (position, factor), size in zip(combination, x.shape[2:], strict=True):
            weight = weight * factor * ((position >= 0) & (position < size))
            index.append(np.clip(np.nan_to_num(position), 0, max(size - 1, 0)).astype(np.int64))
        total += last[tuple(index)] * weight[..., None].astype(x.dtype)
    return np.moveaxis(total, -1, 1)


@register
class GridSample(OpDef):
    """Samples X [N, C, D1..Dr] at grid [N, O1..Or, r]: numbers from -1 to 1 over each axis, the last axis first."""

    agreeing = True
    inputs = "X, grid"
    outputs = "Y"
    attrs = {"align_corners": 0, "mode": "linear", "padding_mode": "zeros"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = check_kind(c, 0, FLOAT)
        check_kind(c, 1, FLOAT)
        for name, allowed in (("mode", tuple(_MODES)), ("padding_mode", _PADDINGS)):
            if c.attr(name) not in allowed:
                c.fail(f"{name} is {c.attr(name)!r}, expected one of {', '.join(allowed)}")
        x, grid = c.shape(0), c.shape(1)
        if x is None or grid is None:
            return [TensorType(dtype, None)]
        if len(x) < 3 or 0 in x[2:]:
            c.fail(f"X is {c.tensor(0)}, expected rank 3 or more and at least one pixel")
        expect_shape(c, 1, (x[0], *(f"O{axis}" for axis in range(1, len(x) - 1)), len(x) - 2))
        return [TensorType(dtype, (x[0], x[1], *grid[1:-1]))]

    def reference(self, c: Call, x: Array, grid: Array) -> Array:
        taps = []
        for axis, size in enumerate(x.shape[2:]):
            numbers = as_computed(grid)[..., x.ndim - 3 - axis]
            taps.append(self._taps(c, numbers, size))
        return np.asarray(gather(as_computed(x), taps)).astype(x.dtype)

    def _taps(self, c: Call, numbers: Any, size: int) -> Taps:
        """The taps along an axis of `size` pixels at grid coordinates `numbers` (-1 to 1).

        With a padding mode other than zeros, all lie inside the image.
        """
        padding, aligned = c.attr("padding_mode"), bool(c.attr("align_corners"))
        position = (numbers + 1) / 2 * (size - 1) if aligned else ((numbers + 1) * size - 1) / 2
        if c.attr("mode") == "nearest":
            position = np.rint(position)
        if c.attr("mode") != "cubic":  # cubic brings each neighbour inside separately
            position = _move_inside(position, size, padding, aligned)
        return [(np.rint(_move_inside(p, size, padding, aligned)), w) for p, w in _MODES[c.attr("mode")](position)]

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _batch_rows_of_both(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """The sum over all combinations of taps: gathered pixels times weights, which depend on the grid.

        UnsupportedError for cubic mode, reflection, and images of symbolic size.
        """
        x, grid = g.x(0), g.x(1)
        sizes = [size for size in x.shape[2:] if isinstance(size, int)]
        if g.attr("mode") == "cubic" or g.attr("padding_mode") == "reflection" or len(sizes) < x.rank - 2:
            g.unsupported(
                "only linear and nearest samples of images of known size, without reflection, are differentiated"
            )
        last = x.transpose(0, *range(2, x.rank), 1)
        axes = [
            self._term_taps(g, grid.gather(g.writer.array(len(sizes) - 1 - i), grid.rank - 1), size)
            for i, size in enumerate(sizes)
        ]
        total = None
        for combination in product(*axes):
            places = [place.unsqueeze(place.rank) for place, _ in combination]
            pixels = last.op("GatherND", places[0].op("Concat", *places[1:], axis=-1), batch_dims=1)
            weights = [weight.unsqueeze(weight.rank) for _, weight in combination]
            part = reduce(lambda part, weight: part * weight, weights, pixels)
            total = part if total is None else total + part
        if total is None:
            g.unsupported("there is no axis to sample along")
        return [total.transpose(0, total.rank - 1, *range(1, total.rank - 1))]

    def _term_taps(self, g: Rewrite, numbers: Term, size: int) -> list[tuple[Term, Term]]:
        """Like `_taps`, as terms: indices that are moved inside, and weights, which are zero for pixels outside."""
        position = (numbers + 1) * ((size - 1) / 2) if g.attr("align_corners") else ((numbers + 1) * size - 1) / 2
        if g.attr("mode") == "nearest":
            position = position.op("Round")
        if g.attr("padding_mode") == "border":
            position = position.op("Max", 0.0).op("Min", float(size - 1))
        low = position.op("Floor")
        fraction = position - low
        taps = [(low, 1 - fraction), (low + 1, fraction)]
        return [(self._inside(at, size), ((at >= 0).op("And", at <= size - 1)).where(weight, 0)) for at, weight in taps]

    def _inside(self, at: Term, size: int) -> Term:
        return at.op("Max", 0.0).op("Min", float(size - 1)).cast(DType.INT64)


def _move_inside(position: Any, size: int, padding: str, aligned: bool) -> Any:
    """`position` with positions outside the image moved inside: to the border, or reflected; unchanged for "zeros"."""
    if padding == "zeros":
        return position
    if padding == "border":
        return np.clip(position, 0, size - 1)
    low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
    outside = (position < low) | (position > high)
    return np.where(outside, _reflect(position, low, high), position)


def _reflect(position: Any, low: float, high: float) -> Any:
    if high <= low:
        return np.full_like(position, low)
    phase = np.mod(position - low, 2 * (high - low)).astype(position.dtype)
    return low + np.minimum(phase, 2 * (high - low) - phase)


def _batch_rows_of_both(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`): if an input has rows, the first two must both have them along axis 0."""
    if all(axis is None for axis in axes):
        return [None]
    if axes[0] != 0 or axes[1] != 0:
        return MixesRows("its images and positions do not both have their rows along the batch axis")
    return [0]


@register
class RoiAlign(OpDef):
    """Each region of interest resampled to output_height x output_width bins, from bilinear samples within each bin.

    rois [R, 4] are x1, y1, x2, y2; batch_indices [R] are the images of the regions. Along each axis, a bin has
    `sampling_ratio` samples; 0 means its extent in pixels, rounded up. A bin is the mean of its samples. In mode "max"
    it is the greatest product of a pixel and its bilinear weight among all samples, as ONNX defines.
    """

    agreeing = True
    inputs = "X, rois, batch_indices"
    outputs = "Y"
    attrs = {
        "coordinate_transformation_mode": "half_pixel", "mode": "avg", "output_height": 1, "output_width": 1,
        "sampling_ratio": 0, "spatial_scale": 1.0,
    }  # fmt: skip
    no_gradient = "it reads between pixels at places that depend on its inputs, which is not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, x, rois = check_kind(c, 0, FLOAT), c.shape(0), c.shape(1)
        if c.attr("mode") not in ("avg", "max"):
            c.fail(f"mode is {c.attr('mode')!r}, expected avg or max")
        if x is None or rois is None:
            return [TensorType(dtype, None)]
        expect_shape(c, 0, ("N", "C", "H", "W"))
        if 0 in x[2:]:
            c.fail(f"X is {c.tensor(0)}, expected at least one pixel")
        for name, least in (("output_height", 1), ("output_width", 1), ("sampling_ratio", 0)):
            if c.attr(name) < least:
                c.fail(f"{name} is {c.attr(name)}, expected at least {least}")
        if not isfinite(c.attr("spatial_scale")):
            c.fail(f"spatial_scale is {c.attr('spatial_scale')}, expected a finite number")
        expect_shape(c, 1, ("num_rois", 4))
        expect_shape(c, 2, (rois[0],))
        return [TensorType(dtype, (rois[0], x[1], c.attr("output_height"), c.attr("output_width")))]

    def reference(self, c: Call, x: Array, rois: Array, images: Array) -> Array:
        bins = (c.attr("output_height"), c.attr("output_width"))
        y = np.zeros((len(rois), x.shape[1], *bins), as_computed(x).dtype)
        if np.any((images < 0) | (images >= len(x))):
            c.fail(f"a batch index lies outside the {len(x)} images")
        for i, (region, image) in enumerate(zip(as_computed(rois), images, strict=True)):
            y[i] = self._region(c, as_computed(x)[image], region, bins)
        return y.astype(x.dtype)

    def _region(self, c: Call, image: Any, region: Any, bins: tuple[int, int]) -> Any:
        """The bins [C, output_height, output_width] of one region of an image [C, H, W].

        FeedError for more than `MOST_SAMPLES` samples along an axis.
        """
        half = 0.5 if c.attr("coordinate_transformation_mode") == "half_pixel" else 0.0
        x1, y1, x2, y2 = region * np.asarray(c.attr("spatial_scale"), region.dtype) - np.asarray(half, region.dtype)
        positions, counts = [], []
        for start, end, count in ((y1, y2, bins[0]), (x1, x2, bins[1])):
            extent = end - start if half else np.maximum(end - start, 1)
            own = np.nan_to_num(np.ceil(extent / count))
            samples = c.attr("sampling_ratio") or int(np.clip(own, 0, MOST_SAMPLES + 1))
            if samples * count > MOST_SAMPLES:
                c.fail(f"a region takes {samples} samples for each of {count} bins, expected {MOST_SAMPLES} in all")
            offsets = (np.arange(count)[:, None] + (np.arange(samples) + 0.5) / max(samples, 1)) * (extent / count)
            positions.append((start + offsets).reshape(-1).astype(image.dtype))
            counts.append(samples)
        if 0 in counts:
            return np.zeros((len(image), *bins), image.dtype)
        rows, columns = (_edge_taps(p, size) for p, size in zip(positions, image.shape[1:], strict=True))
        parts = [image[:, r[:, None], q] * (a[:, None] * b) for (r, a), (q, b) in product(rows, columns)]
        blocks = (len(image), bins[0], counts[0], bins[1], counts[1])
        if c.attr("mode") == "max":
            return np.max(parts, axis=0).reshape(blocks).max(axis=(2, 4))
        return sum(parts).reshape(blocks).mean(axis=(2, 4))


def _edge_taps(position: Any, size: int) -> Taps:
    """Linear taps for RoiAlign. Up to one pixel outside, the border is repeated; further out, weights are zero."""
    inside = (position >= -1) & (position <= size)
    clamped = np.clip(position, 0, size - 1)
    low = np.floor(clamped)
    high = np.minimum(low + 1, size - 1)
    fraction = clamped - low
    return [(low.astype(np.int64), (1 - fraction) * inside), (high.astype(np.int64), fraction * inside)]


@register
class DeformConv(OpDef):
    """Deformable convolution: the kernel reads at positions shifted by `offset` [N, offset_group * K * r, O..].

    K is the number of kernel elements, r that of spatial axes. Each sample is scaled by `mask`
    [N, offset_group * K, O..].
    """

    agreeing = True
    inputs = "X, W, offset, B?, mask?"
    outputs = "Y"
    attrs = {"dilations": None, "group": 1, "kernel_shape": None, "offset_group": 1, "pads": None, "strides": None}
    no_gradient = "it reads between pixels at places that depend on its inputs, which is not differentiated"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, x, w = check_kind(c, 0, FLOAT), c.shape(0), c.shape(1)
        if x is None or w is None:
            return [TensorType(dtype, None)]
        self._check(c, x, w)
        kernel = kernel_of(c, w)
        if kernel is None:
            return [TensorType(dtype, (x[0], w[0], *fresh_spatial(c, len(x) - 2)))]
        out, places = window_output(c, window_of(c, kernel), x[2:]), prod(kernel) * c.attr("offset_group")
        expect_shape(c, 2, (x[0], places * len(kernel), *out))
        expect_shape(c, 4, (x[0], places, *out))
        return [TensorType(dtype, (x[0], w[0], *out))]

    def _check(self, c: Infer, x: Shape, w: Shape) -> None:
        groups = c.attr("group"), c.attr("offset_group")
        if len(x) < 3 or len(w) != len(x):
            c.fail(f"X is {c.tensor(0)}, W is {c.tensor(1)}, expected one rank of at least 3")
        if min(groups) < 1 or any(isinstance(x[1], int) and x[1] % group for group in groups):
            c.fail(f"X has {x[1]} channels, not divisible by group {groups[0]} and offset_group {groups[1]}")
        if not c.agree(w[1], x[1] // groups[0]):
            c.fail(f"X has {x[1]} channels, W expects {w[1]} in each of {groups[0]} groups")
        expect_shape(c, 3, w[:1])

    def reference(
        self, c: Call, x: Array, w: Array, offset: Array, b: Array | None = None, mask: Array | None = None
    ) -> Array:
        columns = self._columns(
            c, as_computed(x), w.shape[2:], as_computed(offset), None if mask is None else as_computed(mask)
        )
        n, group, outputs = len(x), c.attr("group"), w.shape[0]
        out = offset.shape[2:]
        grouped = columns.reshape(n, group, -1, int(np.prod(out)))
        y = (as_computed(w).reshape(group, outputs // group, -1) @ grouped).reshape(n, outputs, *out)
        if b is not None:
            y = y + as_computed(b).reshape(-1, *(1,) * len(out))
        return np.asarray(y).astype(x.dtype)

    def _columns(self, c: Call, x: Any, kernel: tuple[int, ...], offset: Any, mask: Any) -> Any:
        """The samples of all kernel elements, at shifted positions and times the mask: [N, C, K, O..]."""
        window, groups, rank = window_of(c, kernel), c.attr("offset_group"), len(kernel)
        n, out, elements = len(x), offset.shape[2:], int(np.prod(kernel))
        moved = offset.reshape(n, groups, elements, rank, *out)
        scale = None if mask is None else mask.reshape(n, groups, 1, elements, *out)
        base = np.meshgrid(*(np.arange(size, dtype=x.dtype) for size in out), indexing="ij")
        columns = np.empty((n, groups, x.shape[1] // groups, elements, *out), x.dtype)
        for group, (element, tap) in product(range(groups), enumerate(np.ndindex(*kernel))):
            taps = []
            for axis, (before, _) in enumerate(window.pads_for(x.shape[2:])):
                start = tap[axis] * window.dilations[axis] - before
                taps.append(linear_taps(base[axis] * window.strides[axis] + start + moved[:, group, element, axis]))
            channels = x.reshape(n, groups, -1, *x.shape[2:])[:, group]
            columns[:, group, :, element] = gather(channels, taps)
        return (columns if scale is None else columns * scale).reshape(n, x.shape[1], elements, *out)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if all(axis is None for axis in axes):
            return [None]
        moving = [axes[i] for i in (0, 2, 4) if c.has_input(i)]
        if set(moving) != {0} or any(axes[i] is not None for i in (1, 3) if c.has_input(i)):
            return MixesRows("its images, offsets and mask do not all have their rows along the batch axis")
        return [0]
