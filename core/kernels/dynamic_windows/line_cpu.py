"""One line of results of windows that are clipped to the image; `Writer` combines, finishes and stores results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.reduction import lowest, whole_numbers
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.dynamic_windows.spec import DynamicWindow, DynamicWindowsSpec

F32 = DType.FLOAT32
# (line of the image, line of the window, totals) -> the totals after that line of the window.
Taps: TypeAlias = Callable[[Val, Val, list[Val]], list[Val]]


@dataclass(frozen=True)
class Line:
    """A line of results along the last axis, at one place of the other axes."""

    kernel: Kernel
    windows: Sequence[DynamicWindow]
    first: Val  # the number of the first result
    batch: Val
    corners: Sequence[Val]  # of the windows, along all axes but the last
    inside: Sequence[tuple[Val, Val]]  # the range of their taps in the image, along the same axes

    def folded(self, emit: Taps, totals: list[Val]) -> list[Val]:
        """`totals` after all lines of the window that lie in the image.

        `emit(place, tap, totals)` adds one line: `place` is its row-major number in the image, `tap` in the window.
        """
        k = self.kernel

        def nested(axis: int, place: Val, tap: Val, values: list[Val]) -> list[Val]:
            if axis == len(self.corners):
                return emit(place, tap, values)
            window = self.windows[axis]
            with k.fold(*self.inside[axis], values) as fold:
                at = place * k.dim(window.size) + self.corners[axis] + fold.index * window.dilation
                fold.values = nested(axis + 1, at, tap * window.kernel + fold.index, fold.values)
            return fold.values

        return nested(0, self.batch, k.index(0), totals)


@dataclass(frozen=True)
class Writer:
    """Generates the code that combines the elements of windows, and finishes and stores the results of a line.

    It holds the kernel, its spec, and the addresses of the image, the weights, the epilogue's extra inputs and Y.
    """

    kernel: Kernel
    spec: DynamicWindowsSpec
    image: Pointer
    weights: Pointer | None
    extras: Sequence[Pointer]
    y: Pointer

    @property
    def lanes(self) -> int:
        """Lanes of a vector of channels."""
        most = max(self.kernel.target.vector_bytes // self.spec.computed.itemsize, 1)
        return min(most, 1 << (self.spec.channels - 1).bit_length())

    @property
    def window(self) -> DynamicWindow:
        """The window along the last axis."""
        return self.spec.windows[-1]

    def start(self, lanes: int) -> Val:
        """A vector of totals of an empty window: minus infinity for a maximum, 0 for sums."""
        dtype = self.spec.computed
        return self.kernel.constant(lowest(dtype) if self.spec.kind == "max" else 0, dtype, lanes)

    def first_sums(self, at: Val, mask: Val | None) -> Val:
        """A vector of totals before the first product, for channels from `at` on.

        Bytes outside the image count as `fill`: the sums of a window of it are in the line after the weights, and
        `pixel` subtracts it from the others.
        """
        if not self.spec.fill or self.weights is None:
            return self.start(self.lanes)
        return self.weights.at(at).load(self.spec.taps * self.spec.channels, self.lanes, mask)

    def pixel(self, value: Val) -> Val:
        """An element of the image as products take it."""
        return value - float(self.spec.fill) if self.spec.fill else value

    def combined(self, total: Val, value: Val) -> Val:
        """`total` combined with the element `value` of the window: the maximum, or the sum."""
        return self.kernel.ops.max(total, value) if self.spec.kind == "max" else total + value

    def together(self, values: Sequence[Val]) -> Val:
        """The combination (maximum or sum) of all `values`, totals of parts of a window."""
        total, *others = values
        for value in others:
            total = self.combined(total, value)
        return total

    def divisor(self, line: Line, last: Val) -> Val | None:
        """The divisor of an average with `last` places along the last axis; None for other kinds."""
        if "average" not in self.spec.kind:
            return None
        count = last
        for corner, (first, after), window in zip(line.corners, line.inside, self.spec.windows, strict=False):
            padded = self.spec.kind == "padded average"
            count = count * (padded_taps(self.kernel, window, corner) if padded else after - first)
        return count

    def store(
        self, pixel: Val, values: Sequence[Val], at: Val, mask: Val | None = None, count: Val | None = None
    ) -> None:
        """Store adjacent results from number `pixel` on: for each, a vector of channels from `at` on.

        Sums of products go through the epilogue first; totals of averages are divided by `count`.
        """
        finish, pixels = self.spec.finish, [pixel + index for index in range(len(values))]
        if finish is not None:
            if self.spec.dtype is not F32:
                values = [whole_numbers(self.kernel, value) for value in values]
            results = ResultWriter(self.kernel, finish.epilogue, (*self.extras, self.y), (*finish.extra_steps, 1))
            offsets = [offsets_of(self.kernel, finish.pixels, each) for each in pixels]
            results.at_column(at).store([[value] for value in values], offsets, mask)
            return
        for place, value in zip(pixels, values, strict=True):
            found = value if count is None else value / count.cast(F32).splat(value.lanes)
            self.y.store(found, place * self.spec.channels + at, mask)

    def single(self, line: Line, column: Val) -> None:
        """Compute all channels of one result, whose window may reach outside the image."""
        k, window = self.kernel, self.window
        corner = column * window.stride - window.before
        first, after = inside_of(k, corner, window)
        padded = self.spec.kind == "padded average"
        count = self.divisor(line, padded_taps(k, window, corner) if padded else after - first)

        def channels(at: Val, mask: Val | None) -> None:
            taps = self._taps(corner, (first, after), at, mask)
            totals = line.folded(taps, [self.first_sums(at, mask)])
            self.store(line.first + column, totals, at, mask, count)

        k.strip(self.spec.channels, channels, lanes=self.lanes)

    def _taps(self, corner: Val, inside: tuple[Val, Val], at: Val, mask: Val | None) -> Taps:
        """The `emit` of `Line.folded` for one result: it adds a line of taps in a loop, for channels from `at` on.

        `corner` is the window's first column, `inside` the range of its taps in the image.
        """
        k, window, channels = self.kernel, self.window, self.spec.channels

        def emit(place: Val, tap: Val, totals: list[Val]) -> list[Val]:
            with k.fold(*inside, totals) as fold:
                pixel = place * k.dim(window.size) + corner + fold.index * window.dilation
                value = self.image.at(at).load(pixel * channels, self.lanes, mask)
                if self.weights is None:
                    fold.values = [self.combined(fold.values[0], value)]
                else:
                    number = tap * window.kernel + fold.index
                    factor = self.weights.at(at).load(number * channels, self.lanes, mask)
                    fold.values = [k.ops.fma(self.pixel(value), factor, fold.values[0])]
            return fold.values

        return emit


def inside_of(k: Kernel, corner: Val, window: DynamicWindow) -> tuple[Val, Val]:
    """The range [first, after) of taps in the image, for a window that begins at `corner`."""
    return _taps_before(k, window, corner, k.index(0)), _taps_before(k, window, corner, k.dim(window.size))


def padded_taps(k: Kernel, window: DynamicWindow, corner: Val) -> Val:
    """The number of taps in the image or its padding, for a window that begins at `corner`."""
    return _taps_before(k, window, corner, k.dim(window.size) + window.after)


def _taps_before(k: Kernel, window: DynamicWindow, corner: Val, limit: Val) -> Val:
    """The number of taps that lie before place `limit` of an axis, for a window that begins at `corner`."""
    step = window.dilation
    return k.ops.min((k.ops.max(limit - corner, 0) + (step - 1)) // step, window.kernel)
