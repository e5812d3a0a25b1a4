"""Windows that are cut to the image: vectors of channels, one result at a time."""

from __future__ import annotations

from collections.abc import Sequence

from core.codegen.lang import Kernel, Pointer, Val
from core.ir.types import DType
from core.kernels.catalog.open_windows import OpenWindow, OpenWindowsSpec
from core.kernels.cpu.lanes import lowest
from core.kernels.cpu.nest import even_chunks, grain, offsets_of
from core.kernels.cpu.results import Results
from core.kernels.target import Target

F32 = DType.FLOAT32


def generate(spec: OpenWindowsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    extras = spec.finish.extra_dtypes if spec.finish is not None else ()
    weighted = spec.finish is not None
    operands = [k.operand(i, dtype) for i, dtype in enumerate((F32, *([F32] if weighted else []), *extras))]
    y = k.operand(len(operands), spec.finish.dtype if spec.finish is not None else F32)
    lanes = min(target.lanes, 1 << (spec.channels - 1).bit_length())
    steps = grain(8 * spec.channels, spec.taps * spec.channels)
    with even_chunks(k, k.dim(spec.pixels), steps) as (start, stop), k.loop(start, stop) as pixel:
        batch, *places = k.unravel(pixel, [k.index(0), *(k.dim(window.count) for window in spec.windows)])
        corners = [place * w.stride - w.before for place, w in zip(places, spec.windows, strict=True)]
        inside = [_inside(k, corner, w) for corner, w in zip(corners, spec.windows, strict=True)]
        count = _divisor(k, spec, corners, inside)
        offsets = offsets_of(k, spec.finish.pixels, pixel) if spec.finish is not None else []

        def channels(at: Val, mask: Val | None) -> None:
            weights = operands[1].at(at) if weighted else None
            total = _window(k, spec, operands[0].at(at), weights, batch, corners, inside, lanes, mask)
            if spec.finish is not None:
                results = Results(k, spec.finish.epilogue, (*operands[2:], y), (*spec.finish.extra_steps, 1))
                results.at_column(at).store([[total]], [offsets], mask)
            else:
                value = total if count is None else total / count.cast(F32).splat(lanes)
                y.store(value, pixel * spec.channels + at, mask)

        k.strip(spec.channels, channels, lanes=lanes)
    return k


def _inside(k: Kernel, corner: Val, window: OpenWindow) -> tuple[Val, Val]:
    """The taps [first, after) of a window that meet the image."""
    return _taps_before(k, window, corner, k.index(0)), _taps_before(k, window, corner, k.dim(window.size))


def _taps_before(k: Kernel, window: OpenWindow, corner: Val, limit: Val) -> Val:
    """How many taps lie before a place of the axis."""
    step = window.dilation
    return k.ops.min((k.ops.max(limit - corner, 0) + (step - 1)) // step, window.kernel)


def _divisor(k: Kernel, spec: OpenWindowsSpec, corners: Sequence[Val], inside: Sequence[tuple[Val, Val]]) -> Val | None:
    """How many places an average counts; None for others."""
    if "average" not in spec.kind:
        return None
    count = k.index(1)
    for corner, (first, after), window in zip(corners, inside, spec.windows, strict=True):
        if spec.kind == "padded average":
            count = count * _taps_before(k, window, corner, k.dim(window.size) + window.after)
        else:
            count = count * (after - first)
    return count


def _window(
    k: Kernel,
    spec: OpenWindowsSpec,
    image: Pointer,
    weights: Pointer | None,
    batch: Val,
    corners: Sequence[Val],
    inside: Sequence[tuple[Val, Val]],
    lanes: int,
    mask: Val | None,
) -> Val:
    """One result of a vector of channels. `image` and `weights` begin at these channels."""

    def nested(axis: int, place: Val, tap: Val, total: Val) -> Val:
        if axis == len(spec.windows):
            value = image.load(place * spec.channels, lanes, mask)
            if weights is not None:
                return k.ops.fma(value, weights.load(tap * spec.channels, lanes, mask), total)
            return k.ops.max(total, value) if spec.kind == "max" else total + value
        window, (first, after) = spec.windows[axis], inside[axis]
        with k.fold(first, after, [total]) as fold:
            at = place * k.dim(window.size) + corners[axis] + fold.index * window.dilation
            fold.values = [nested(axis + 1, at, tap * window.kernel + fold.index, fold.values[0])]
        return fold.values[0]

    start = k.constant(lowest(F32) if spec.kind == "max" else 0, F32, lanes)
    return nested(0, batch, k.index(0), start)
