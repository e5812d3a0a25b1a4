"""One line of results of windows that are cut to the image, and how a result is combined, finished and stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from core.codegen.lang import Kernel, Pointer, Val
from core.ir.types import DType
from core.kernels.catalog.open_windows import OpenWindow, OpenWindowsSpec
from core.kernels.cpu.lanes import lowest
from core.kernels.cpu.nest import offsets_of
from core.kernels.cpu.results import Results

F32 = DType.FLOAT32
# (line of the image, line of the window, totals) -> the totals after that line of the window.
Taps: TypeAlias = Callable[[Val, Val, list[Val]], list[Val]]


@dataclass(frozen=True)
class Line:
    """The results along the last axis that share their places along the other ones."""

    kernel: Kernel
    windows: Sequence[OpenWindow]
    first: Val  # the number of the first result
    batch: Val
    corners: Sequence[Val]  # of the windows, along all axes but the last
    inside: Sequence[tuple[Val, Val]]  # their taps that meet the image, along the same axes

    def folded(self, emit: Taps, totals: list[Val]) -> list[Val]:
        """The totals after all lines of the window that meet the image."""
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
    """Computes and stores the results of a line."""

    kernel: Kernel
    spec: OpenWindowsSpec
    image: Pointer
    weights: Pointer | None
    extras: Sequence[Pointer]
    y: Pointer

    @property
    def lanes(self) -> int:
        """Of a vector of channels."""
        return min(self.kernel.target.lanes, 1 << (self.spec.channels - 1).bit_length())

    @property
    def window(self) -> OpenWindow:
        """Along the last axis."""
        return self.spec.windows[-1]

    def start(self, lanes: int) -> Val:
        """What a window of nothing gives."""
        return self.kernel.constant(lowest(F32) if self.spec.kind == "max" else 0, F32, lanes)

    def combined(self, total: Val, value: Val) -> Val:
        """The result of a pool after one more place of the image."""
        return self.kernel.ops.max(total, value) if self.spec.kind == "max" else total + value

    def together(self, values: Sequence[Val]) -> Val:
        """The result of a pool from those of its parts."""
        total, *others = values
        for value in others:
            total = self.combined(total, value)
        return total

    def divisor(self, line: Line, last: Val) -> Val | None:
        """How many places an average counts, `last` of them along the last axis; None for what is no average."""
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
        """Finish and store neighbouring results, a vector of channels from `at` on of each."""
        finish, pixels = self.spec.finish, [pixel + index for index in range(len(values))]
        if finish is not None:
            results = Results(self.kernel, finish.epilogue, (*self.extras, self.y), (*finish.extra_steps, 1))
            offsets = [offsets_of(self.kernel, finish.pixels, each) for each in pixels]
            results.at_column(at).store([[value] for value in values], offsets, mask)
            return
        for place, value in zip(pixels, values, strict=True):
            found = value if count is None else value / count.cast(F32).splat(value.lanes)
            self.y.store(found, place * self.spec.channels + at, mask)

    def single(self, line: Line, column: Val) -> None:
        """All channels of one result, wherever its window lies."""
        k, window = self.kernel, self.window
        corner = column * window.stride - window.before
        first, after = inside_of(k, corner, window)
        padded = self.spec.kind == "padded average"
        count = self.divisor(line, padded_taps(k, window, corner) if padded else after - first)

        def channels(at: Val, mask: Val | None) -> None:
            taps = self._taps(corner, (first, after), at, mask)
            self.store(line.first + column, line.folded(taps, [self.start(self.lanes)]), at, mask, count)

        k.strip(self.spec.channels, channels, lanes=self.lanes)

    def _taps(self, corner: Val, inside: tuple[Val, Val], at: Val, mask: Val | None) -> Taps:
        """One tap of a line after the other, for a vector of channels."""
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
                    fold.values = [k.ops.fma(value, factor, fold.values[0])]
            return fold.values

        return emit


def inside_of(k: Kernel, corner: Val, window: OpenWindow) -> tuple[Val, Val]:
    """The taps [first, after) of a window that meet the image."""
    return _taps_before(k, window, corner, k.index(0)), _taps_before(k, window, corner, k.dim(window.size))


def padded_taps(k: Kernel, window: OpenWindow, corner: Val) -> Val:
    """How many taps of a window meet the image or its padding."""
    return _taps_before(k, window, corner, k.dim(window.size) + window.after)


def _taps_before(k: Kernel, window: OpenWindow, corner: Val, limit: Val) -> Val:
    """How many taps lie before a place of the axis."""
    step = window.dilation
    return k.ops.min((k.ops.max(limit - corner, 0) + (step - 1)) // step, window.kernel)
