"""Pools of images of one channel, in vectors of adjacent results.

The lines of a window are pooled column by column first. For the results from column c on, the columns lie in *planes*,
one for each remainder of a tap by the stride. Lane i of plane p is column `(c + i) * stride + p`. A further tap is thus
a shift over two successive planes, and the planes of one vector of results serve the next vector too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from lathe.core.codegen.lang import Pointer, Val
from lathe.core.kernels.cpu.register_shuffles import shuffle
from lathe.core.kernels.dynamic_windows.line_cpu import F32, Line, Writer

Planes: TypeAlias = list[Val]


def _last_shift(writer: Writer) -> int:
    """The number of lanes by which the last tap is shifted."""
    window = writer.window
    return (window.kernel - 1) * window.dilation // window.stride


def _phases(writer: Writer) -> list[int]:
    """The remainders of the taps' columns, relative to the window's first, divided by the stride; sorted, each once."""
    window = writer.window
    return sorted({tap * window.dilation % window.stride for tap in range(window.kernel)})


def row_vectors(writer: Writer, line: Line, begin: Val, end: Val) -> None:
    """Compute the results [begin, end) of a line."""
    k, lanes, looks_ahead = writer.kernel, writer.kernel.target.lanes, _last_shift(writer) > 0
    with k.fold(begin, end, _planes(writer, line, begin) if looks_ahead else [], lanes) as fold:
        here = fold.values if looks_ahead else _planes(writer, line, fold.index)
        ahead = _planes(writer, line, fold.index + lanes) if looks_ahead else []
        value = _average(writer, line, fold.index, _windows(writer, here, ahead))
        place, left = line.first + fold.index, end - fold.index
        with k.when(left >= lanes):
            writer.y.store(value, place)
        with k.when(left < lanes):
            writer.y.store(value, place, k.lane_mask(left, lanes))
        fold.values = ahead


def _average(writer: Writer, line: Line, column: Val, total: Val) -> Val:
    """A vector of results from `column` on: `total`, which is divided by the number of places for averages."""
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
    """The planes of the results from `column` on, in the order of `_phases`.

    Loads are masked only if a vector reaches outside the line.
    """
    k, window = writer.kernel, writer.window
    corner = column * window.stride - window.before
    starts, step = _vectors(writer)
    inside = (corner >= 0) & (corner + (starts[-1] + (k.target.lanes - 1) * step) < k.dim(window.size))

    def nothing() -> list[Val]:
        return [writer.start(k.target.lanes)] * len(starts)

    def at_the_end() -> list[Val]:
        return k.choose(corner < k.dim(window.size), lambda: _pool_columns(writer, line, corner, True), nothing)

    found = k.choose(inside, lambda: _pool_columns(writer, line, corner, False), at_the_end)
    if window.stride != 2:
        return found
    lanes = range(k.target.lanes)
    return [shuffle(k, found[0], found[1], [phase + 2 * lane for lane in lanes]) for phase in _phases(writer)]


def _vectors(writer: Writer) -> tuple[Sequence[int], int]:
    """The first columns of the vectors that form the planes, and the distance between lanes.

    With stride 2, planes are shuffled from two vectors of contiguous columns; with larger strides they are gathered.
    """
    stride, lanes = writer.window.stride, writer.kernel.target.lanes
    return ([half * lanes for half in range(stride)], 1) if stride <= 2 else (_phases(writer), stride)


def _pool_columns(writer: Writer, line: Line, corner: Val, masked: bool) -> list[Val]:
    """The vectors of image columns that `_vectors` lists, relative to `corner`, pooled over the lines of the window.

    If `masked`, columns outside the image give the identity; otherwise all must lie inside.
    """
    k, window, lanes = writer.kernel, writer.window, writer.kernel.target.lanes
    starts, step = _vectors(writer)
    numbers = k.lane_numbers(lanes) * step
    masks = [_inside_image(writer, numbers + (corner + start)) if masked else None for start in starts]

    def emit(place: Val, _: Val, totals: list[Val]) -> list[Val]:
        image = writer.image.at(place * k.dim(window.size) + corner)
        loads = [_load(writer, image, start, step, mask) for start, mask in zip(starts, masks, strict=True)]
        return [writer.combined(total, load) for total, load in zip(totals, loads, strict=True)]

    return line.folded(emit, [writer.start(lanes)] * len(starts))


def _inside_image(writer: Writer, columns: Val) -> Val:
    """A mask of the columns that lie in the image."""
    k = writer.kernel
    return (columns >= 0) & (columns < k.dim(writer.window.size))


def _load(writer: Writer, image: Pointer, start: int, step: int, mask: Val | None) -> Val:
    """A vector of every `step`-th column of the line `image` from `start` on; the identity where the mask is false."""
    k, lanes = writer.kernel, writer.kernel.target.lanes
    found = image.load(start, lanes, mask) if step == 1 else image.gather(k.lane_numbers(lanes) * step + start, mask)
    return found if mask is None else k.ops.select(mask, found, writer.start(lanes))


def _windows(writer: Writer, here: Planes, ahead: Planes) -> Val:
    """A vector of results, from its planes (`here`) and those of the next vector (`ahead`)."""
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
    """The number of taps along the last axis that count in the divisor of the results from `column` on, as float32."""
    k, window, lanes = writer.kernel, writer.window, writer.kernel.target.lanes
    corners = (k.lane_numbers(lanes) + column) * window.stride - window.before
    one, total = k.constant(1.0, F32, lanes), k.zeros(F32, lanes)
    for tap in range(window.kernel):
        places = corners + tap * window.dilation
        padded = writer.spec.kind == "padded average"
        counts = places < k.dim(window.size) + window.after if padded else _inside_image(writer, places)
        total = total + k.ops.select(counts, one, k.zeros(F32, lanes))
    return total
