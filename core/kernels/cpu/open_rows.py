"""Pools of images of one channel: vectors of neighbouring results.

The lines that a window meets are pooled column by column first: for the results from column c on, in *planes*, one for
each place that a tap may have within a stride. Lane i of plane p is column `(c + i) * stride + p`, so a tap further on
is a shift over two planes that follow one another, and those of one vector serve the next one as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from core.codegen.lang import Pointer, Val
from core.kernels.cpu.open_line import F32, Line, Writer
from core.kernels.cpu.tile import shuffle

Planes: TypeAlias = list[Val]


def _shifts(writer: Writer) -> int:
    """By how many lanes the last tap is shifted."""
    window = writer.window
    return (window.kernel - 1) * window.dilation // window.stride


def _phases(writer: Writer) -> list[int]:
    """The places within a stride that taps have."""
    window = writer.window
    return sorted({tap * window.dilation % window.stride for tap in range(window.kernel)})


def row_vectors(writer: Writer, line: Line, begin: Val, end: Val) -> None:
    """The results [begin, end) of a line."""
    k, lanes, looks_ahead = writer.kernel, writer.kernel.target.lanes, _shifts(writer) > 0
    with k.fold(begin, end, _planes(writer, line, begin) if looks_ahead else [], lanes) as fold:
        here = fold.values if looks_ahead else _planes(writer, line, fold.index)
        ahead = _planes(writer, line, fold.index + lanes) if looks_ahead else []
        value = _averaged(writer, line, fold.index, _windows(writer, here, ahead))
        place, left = line.first + fold.index, end - fold.index
        with k.when(left >= lanes):
            writer.y.store(value, place)
        with k.when(left < lanes):
            writer.y.store(value, place, k.lane_mask(left, lanes))
        fold.values = ahead


def _averaged(writer: Writer, line: Line, column: Val, total: Val) -> Val:
    """A vector of results from `column` on, whose sums are `total` where they are averages."""
    others = writer.divisor(line, writer.kernel.index(1))
    if others is None:
        return total
    k, window, lanes = writer.kernel, writer.window, writer.kernel.target.lanes
    corner = column * window.stride - window.before
    reach = (lanes - 1) * window.stride + (window.kernel - 1) * window.dilation
    inside = (corner >= 0) & (corner + reach < k.dim(window.size))
    full = k.constant(float(window.kernel), F32, lanes)
    (count,) = k.choose(inside, lambda: [full], lambda: [_taps_inside(writer, column)])
    return total / (count * others.cast(F32).splat(lanes))


def _planes(writer: Writer, line: Line, column: Val) -> Planes:
    """The planes of the results from `column` on, in the order of `_phases`. Loads are masked only where a vector
    reaches outside the line."""
    k, window = writer.kernel, writer.window
    corner = column * window.stride - window.before
    starts, step = _vectors(writer)
    inside = (corner >= 0) & (corner + (starts[-1] + (k.target.lanes - 1) * step) < k.dim(window.size))

    def nothing() -> list[Val]:
        return [writer.start(k.target.lanes)] * len(starts)

    def at_the_end() -> list[Val]:
        return k.choose(corner < k.dim(window.size), lambda: _pooled(writer, line, corner, True), nothing)

    found = k.choose(inside, lambda: _pooled(writer, line, corner, False), at_the_end)
    if window.stride != 2:
        return found
    lanes = range(k.target.lanes)
    return [shuffle(k, found[0], found[1], [phase + 2 * lane for lane in lanes]) for phase in _phases(writer)]


def _vectors(writer: Writer) -> tuple[Sequence[int], int]:
    """Where the vectors of columns begin that make the planes, and from one lane to the next. Those of stride 2 are
    picked from two vectors of all columns; those of larger strides are gathered."""
    stride, lanes = writer.window.stride, writer.kernel.target.lanes
    return ([half * lanes for half in range(stride)], 1) if stride <= 2 else (_phases(writer), stride)


def _pooled(writer: Writer, line: Line, corner: Val, masked: bool) -> list[Val]:
    """The vectors of columns, pooled over the lines of the window."""
    k, window, lanes = writer.kernel, writer.window, writer.kernel.target.lanes
    starts, step = _vectors(writer)
    numbers = k.lane_numbers(lanes) * step
    masks = [_meets(writer, numbers + (corner + start)) if masked else None for start in starts]

    def emit(place: Val, _: Val, totals: list[Val]) -> list[Val]:
        image = writer.image.at(place * k.dim(window.size) + corner)
        loads = [_load(writer, image, start, step, mask) for start, mask in zip(starts, masks, strict=True)]
        return [writer.combined(total, load) for total, load in zip(totals, loads, strict=True)]

    return line.folded(emit, [writer.start(lanes)] * len(starts))


def _meets(writer: Writer, columns: Val) -> Val:
    """Which of a vector of columns lie in the image."""
    k = writer.kernel
    return (columns >= 0) & (columns < k.dim(writer.window.size))


def _load(writer: Writer, image: Pointer, start: int, step: int, mask: Val | None) -> Val:
    """Every `step`-th column from `start` on; what is masked counts as a window of nothing."""
    k, lanes = writer.kernel, writer.kernel.target.lanes
    found = image.load(start, lanes, mask) if step == 1 else image.gather(k.lane_numbers(lanes) * step + start, mask)
    return found if mask is None else k.ops.select(mask, found, writer.start(lanes))


def _windows(writer: Writer, here: Planes, ahead: Planes) -> Val:
    """A vector of results from its planes and those that follow."""
    k, window, lanes = writer.kernel, writer.window, writer.kernel.target.lanes
    phases, taps = _phases(writer), list[Val]()
    for tap in range(window.kernel):
        shift, phase = divmod(tap * window.dilation, window.stride)
        plane = phases.index(phase)
        if shift == 0:
            taps.append(here[plane])
        else:
            taps.append(shuffle(k, here[plane], ahead[plane], range(shift, shift + lanes)))
    return writer.together(taps)


def _taps_inside(writer: Writer, column: Val) -> Val:
    """How many taps along the last axis each of a vector of averages counts."""
    k, window, lanes = writer.kernel, writer.window, writer.kernel.target.lanes
    corners = (k.lane_numbers(lanes) + column) * window.stride - window.before
    one, total = k.constant(1.0, F32, lanes), k.zeros(F32, lanes)
    for tap in range(window.kernel):
        places = corners + tap * window.dilation
        padded = writer.spec.kind == "padded average"
        counts = places < k.dim(window.size) + window.after if padded else _meets(writer, places)
        total = total + k.ops.select(counts, one, k.zeros(F32, lanes))
    return total
