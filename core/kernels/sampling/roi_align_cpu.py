"""RoiAlign: a task is a region. For each vector of bins, samples are added one after the other to all channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.sampling.roi_align_spec import RoiAlignSpec
from lathe.core.kernels.target import Target
from lathe.core.ops.image.sampling import MOST_SAMPLES

F32, I32, I64 = DType.FLOAT32, DType.INT32, DType.INT64
_LOWEST = float("-inf")


def generate(spec: RoiAlignSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, regions, images, y = (k.operand(i, dtype) for i, dtype in enumerate((F32, F32, spec.index, F32)))
    channels, plane = k.dim(spec.channels), k.dim(spec.sizes[0] * spec.sizes[1])
    count = spec.bins[0] * spec.bins[1]
    with k.parallel(k.dim(spec.regions)) as (region,):
        image = images.load(region).cast(I64)
        axes = [_axis(k, spec, regions.at(region * 4), axis) for axis in range(2)]
        valid = (image >= 0) & (image < k.dim(spec.batch))
        for axis in axes:
            valid = valid & (axis.samples * axis.bins <= MOST_SAMPLES)
        with k.when(~valid):
            k.refuse(Status.INDEX_OUT_OF_RANGE)
        with k.when(valid):
            source, result = x.at(image * channels * plane), y.at(region * channels * count)
            _region(k, spec, source, result, axes)
    return k


@dataclass(frozen=True)
class _Axis:
    """A region along one axis: start and step in pixels (float32), and the number of samples per bin."""

    start: Val
    step: Val  # from bin to bin
    bins: int
    samples: Val
    size: Val

    def taps(self, k: Kernel, bin_: Val, sample: Val) -> tuple[Val, list[tuple[Val, Val]]]:
        """For sample number `sample` of each bin: whether it is in the image, and (pixel, weight) of two pixels around.

        Samples up to one pixel outside count as inside, and read the border.
        """
        lanes, size = bin_.lanes, self.size.cast(F32)
        offset = (sample.cast(F32) + 0.5) / self.samples.cast(F32)
        position = (bin_.cast(F32) + offset) * self.step + self.start
        inside = (position >= -1.0) & (position <= size)
        clamped = k.ops.max(k.ops.min(k.ops.select(inside, position, k.zeros(F32, lanes)), size - 1.0), 0.0)
        low = k.ops.floor(clamped)
        fraction, first = clamped - low, low.cast(I32)
        second = k.ops.min(first + 1, (self.size - 1).cast(I32))
        return inside, [(first, 1.0 - fraction), (second, fraction)]


def _axis(k: Kernel, spec: RoiAlignSpec, region: Pointer, axis: int) -> _Axis:
    """The region whose corners x1, y1, x2, y2 lie at `region`, along axis 0 (vertical) or 1 (horizontal)."""
    half = 0.5 if spec.half else 0.0
    start, end = (region.load(at) * k.constant(spec.scale, F32) - half for at in (1 - axis, 3 - axis))
    extent = end - start if spec.half else k.ops.max(end - start, 1.0)
    step = extent / float(spec.bins[axis])
    if spec.samples:
        samples = k.index(spec.samples)
    else:
        whole = k.ops.ceil(step)
        is_positive = whole > 0.0  # false for NaN
        most = k.ops.min(k.ops.select(is_positive, whole, k.zeros(F32)), float(MOST_SAMPLES + 1))
        samples = most.cast(I64)
    return _Axis(start, step, spec.bins[axis], samples, k.dim(spec.sizes[axis]))


def _region(k: Kernel, spec: RoiAlignSpec, image: Pointer, y: Pointer, axes: Sequence[_Axis]) -> None:
    """Compute all bins of a region for all channels of `image`, and store them at `y` [channels, *bins]."""
    count, lanes = spec.bins[0] * spec.bins[1], k.target.lanes
    channels, (lines, columns) = k.dim(spec.channels), axes
    any_sample = (lines.samples > 0) & (columns.samples > 0)
    begin = k.ops.select(any_sample, k.constant(_LOWEST if spec.greatest else 0.0, F32), k.zeros(F32))

    def bins(at: Val, mask: Val | None) -> None:
        place = k.lane_numbers(lanes).cast(I32) + at.cast(I32)
        line, column = k.ops.unsigned_div(place, columns.bins), k.ops.unsigned_rem(place, columns.bins)
        with k.loop(0, channels) as channel:
            y.store(begin.splat(lanes), channel * count + at, mask)
        with k.loop(0, lines.samples) as i, k.loop(0, columns.samples) as j:
            (inside, rows), (beside, across) = lines.taps(k, line, i), columns.taps(k, column, j)
            there = inside & beside if mask is None else inside & beside & mask
            share = 1.0 / (lines.samples * columns.samples).cast(F32) if not spec.greatest else k.constant(1.0, F32)
            share = k.ops.select(inside & beside, share, k.zeros(F32, lanes))
            taps = [
                ((row * columns.size.cast(I32) + place).cast(I64), a * b * share)
                for row, a in rows
                for place, b in across
            ]
            with k.loop(0, channels) as channel:
                plane, target = image.at(channel * lines.size * columns.size), channel * count + at
                total = y.load(target, lanes, mask)
                for offsets, weight in taps:
                    pixel = plane.gather(offsets, there)
                    if spec.greatest:
                        total = k.ops.max(total, pixel * weight)
                    else:
                        total = k.ops.fma(pixel, weight, total)
                y.store(total, target, mask)

    k.strip(count, bins, lanes=lanes)
