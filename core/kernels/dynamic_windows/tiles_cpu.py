"""Tiles of adjacent results whose windows lie in the image along the last axis: taps are unrolled and share loads."""

from __future__ import annotations

from lathe.core.codegen.lang import Val
from lathe.core.kernels.dynamic_windows.line_cpu import Line, Writer

_SPARE = 4  # registers for a load, a factor and the epilogue


def channel_tiles(writer: Writer, line: Line, low: Val, high: Val) -> Val:
    """Compute the results [low, high) in tiles of adjacent results, a vector of channels at a time. Returns `high`."""
    k, count = writer.kernel, _results_per_tile(writer)
    full = low + (high - low) // count * count
    with k.loop(low, full, count) as column:
        _tile(writer, line, column, count)
    if count > 1:
        with k.loop(full, high) as column:
            _tile(writer, line, column, 1)
    return high


def _results_per_tile(writer: Writer) -> int:
    """The number of results per tile, limited by registers and by the length of the unrolled code.

    A pool needs one accumulator per image column that the tile reads, a convolution one per result.
    """
    window, room = writer.window, writer.kernel.target.registers - _SPARE
    for count in (8, 6, 4, 3, 2):
        totals = count if writer.weights is not None else len(_columns(writer, count))
        if totals <= room // (2 if writer.weights is not None else 1) and count * window.kernel <= 64:
            return count
    return 1


def _columns(writer: Writer, count: int) -> list[int]:
    """The columns of the image that a tile of `count` results reads, relative to its first column, sorted."""
    window = writer.window
    return sorted({c * window.stride + t * window.dilation for c in range(count) for t in range(window.kernel)})


def _tile(writer: Writer, line: Line, column: Val, count: int) -> None:
    """Compute all channels of `count` results from `column` on."""
    k, window, spec = writer.kernel, writer.window, writer.spec
    corner = column * window.stride - window.before
    divisor = writer.divisor(line, k.index(window.kernel))
    sums = _pool_totals if writer.weights is None else _product_sums

    def channels(at: Val, mask: Val | None) -> None:
        writer.store(line.first + column, sums(writer, line, corner, count, at, mask), at, mask, divisor)

    k.strip(spec.channels, channels, lanes=writer.lanes)


def _pool_totals(writer: Writer, line: Line, corner: Val, count: int, at: Val, mask: Val | None) -> list[Val]:
    """The totals of `count` adjacent pools whose first window begins at column `corner`, for channels from `at` on.

    Each image column is pooled separately, then the columns of each window are combined.
    """
    k, window, lanes = writer.kernel, writer.window, writer.lanes
    columns = _columns(writer, count)

    def emit(place: Val, _: Val, totals: list[Val]) -> list[Val]:
        image = writer.image.at((place * k.dim(window.size) + corner) * writer.spec.channels + at)
        loads = [image.load(column * writer.spec.channels, lanes, mask) for column in columns]
        return [writer.combined(total, load) for total, load in zip(totals, loads, strict=True)]

    found = dict(zip(columns, line.folded(emit, [writer.start(lanes)] * len(columns)), strict=True))
    parts = [[found[c * window.stride + t * window.dilation] for t in range(window.kernel)] for c in range(count)]
    return [writer.together(part) for part in parts]


def _product_sums(writer: Writer, line: Line, corner: Val, count: int, at: Val, mask: Val | None) -> list[Val]:
    """The sums of products of `count` adjacent windows, the first one at column `corner`, for channels from `at` on."""
    k, window, channels, lanes = writer.kernel, writer.window, writer.spec.channels, writer.lanes
    weights = writer.weights
    assert weights is not None

    def emit(place: Val, tap: Val, totals: list[Val]) -> list[Val]:
        image = writer.image.at((place * k.dim(window.size) + corner) * channels + at)
        factors = weights.at(tap * (window.kernel * channels) + at)
        sums, seen = list(totals), dict[int, Val]()
        for t in range(window.kernel):
            factor = factors.load(t * channels, lanes, mask)
            for c in range(count):
                column = c * window.stride + t * window.dilation
                if column not in seen:
                    seen[column] = writer.pixel(image.load(column * channels, lanes, mask))
                sums[c] = k.ops.fma(seen[column], factor, sums[c])
        return sums

    return line.folded(emit, [writer.first_sums(at, mask)] * count)
