"""Windows that are clipped to the image at run time.

Adjacent results whose windows lie inside along the last axis share their loads: in vectors of channels, or in vectors
of adjacent results for images of one channel. At the ends of a line the range of taps is computed for each result.
"""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.kernels.cpu.nest import even_chunks, grain
from lathe.core.kernels.dynamic_windows.line_cpu import F32, Line, Writer, inside_of
from lathe.core.kernels.dynamic_windows.rows_cpu import row_vectors
from lathe.core.kernels.dynamic_windows.spec import MOST_UNROLLED, DynamicWindow, DynamicWindowsSpec
from lathe.core.kernels.dynamic_windows.tiles_cpu import channel_tiles
from lathe.core.kernels.target import Target


def generate(spec: DynamicWindowsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    extras = spec.finish.extra_dtypes if spec.finish is not None else ()
    weighted = spec.finish is not None
    read = [k.operand(0, spec.dtype).converting(spec.computed), *([k.operand(1, F32)] if weighted else [])]
    operands = [*read, *(k.operand(len(read) + i, dtype) for i, dtype in enumerate(extras))]
    y = k.operand(len(operands), spec.finish.dtype if spec.finish is not None else spec.dtype)
    weights, *others = operands[1:] if weighted else (None, *operands[1:])
    writer = Writer(k, spec, operands[0], weights, [each for each in others if each is not None], y)
    steps = grain(8 * spec.channels, spec.taps * spec.channels)
    width = k.dim(writer.window.count)
    with (
        even_chunks(k, k.dim(spec.pixels), steps) as (start, stop),
        k.loop(start // width, (stop + width - 1) // width) as row,
    ):
        first = row * width
        _line(writer, row, k.ops.max(start - first, 0), k.ops.min(stop - first, width))
    return k


def _line(writer: Writer, row: Val, begin: Val, end: Val) -> None:
    """Compute the results [begin, end) of line number `row`; lines count over the batch and all axes but the last."""
    k, windows = writer.kernel, writer.spec.windows
    batch, *places = k.unravel(row, [k.index(0), *(k.dim(window.count) for window in windows[:-1])])
    corners = [place * w.stride - w.before for place, w in zip(places, windows, strict=False)]
    inside = [inside_of(k, corner, w) for corner, w in zip(corners, windows, strict=False)]
    line = Line(k, windows, row * k.dim(writer.window.count), batch, corners, inside)
    if writer.spec.channels == 1 and writer.spec.dtype is F32 and writer.window.has_vectors(k.target):
        row_vectors(writer, line, begin, end)
        return
    low, high = _inside_line(k, writer.window, begin, end)
    done = channel_tiles(writer, line, low, high)
    before = low - begin
    with k.loop(0, before + (end - done)) as border:
        writer.single(line, k.ops.select(border < before, begin + border, border - before + done))


def _inside_line(k: Kernel, window: DynamicWindow, begin: Val, end: Val) -> tuple[Val, Val]:
    """The range of results in [begin, end) whose windows lie in the image along the last axis.

    It is empty if windows are too wide to be unrolled.
    """
    if window.kernel > MOST_UNROLLED:
        return begin, begin
    first = -(-window.before // window.stride)
    room = k.dim(window.size) + (window.before - (window.kernel - 1) * window.dilation)
    after = (k.ops.max(room, 0) + (window.stride - 1)) // window.stride
    low = k.ops.min(k.ops.max(begin, first), end)
    return low, k.ops.max(k.ops.min(end, after), low)
