"""The gradient of MaxPool for overlapping windows: each window adds its gradient to its first maximum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.conv.batch_cpu import Taps, taps
from lathe.core.kernels.pool.gradient_spec import PoolSumSpec
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32
Visit: TypeAlias = Callable[[Val, Val], Val]  # (place of the window, carried value) -> carried value


def generate(spec: PoolSumSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, dy, dx = (k.operand(i, F32) for i in range(3))
    size = prod(window.size for window in spec.windows) * spec.channels
    counts = [window.count for window in spec.windows]
    with k.parallel(k.dim(spec.batch)) as (image,):
        source, result = x.at(image * size), dx.at(image * size)
        clear(k, result, size)
        with k.loop(0, prod(counts)) as window:
            reach = [taps(k, w, 1, at) for w, at in zip(spec.windows, k.unravel(window, counts), strict=True)]
            seed = dy.at((image * prod(counts) + window) * spec.channels)
            _window(k, spec, source, seed, result, reach)
    return k


def _window(k: Kernel, spec: PoolSumSpec, x: Pointer, seed: Pointer, dx: Pointer, reach: Sequence[Taps]) -> None:
    """Add the gradient of one result, at `seed`, to `dx` at the first maximum of its window, for all channels.

    `x` and `dx` point to the image and its gradient; `reach` are the window's taps inside the image, by axis.
    """

    def along(axis: int, place: Val, values: Sequence[Val], visit: Visit) -> list[Val]:
        """Generate `values[0] = visit(offset, values[0])` for each place of the window, over the axes from `axis` on.

        `place` is the row-major position along the axes before. Returns the last value in a list.
        """
        if axis == len(reach):
            return [visit(place * spec.channels, values[0])]
        taps = reach[axis]
        with k.fold(taps.first, taps.last, values) as fold:
            inner = place * spec.windows[axis].size + (taps.source + fold.index * taps.step)
            fold.values = along(axis + 1, inner, fold.values, visit)
        return fold.values

    def channels(at: Val, mask: Val | None) -> None:
        def highest(place: Val, known: Val) -> Val:
            return k.ops.max(known, x.load(place + at, k.lanes, mask))

        def add_gradient(place: Val, left: Val) -> Val:
            here, zero = place + at, k.zeros(F32, k.lanes)
            hit = k.ops.eq(x.load(here, k.lanes, mask), greatest)
            dx.store(dx.load(here, k.lanes, mask) + k.ops.select(hit, left, zero), here, mask)
            return k.ops.select(hit, zero, left)

        (greatest,) = along(0, k.index(0), [k.constant(-math.inf, F32, k.lanes)], highest)
        along(0, k.index(0), [seed.load(at, k.lanes, mask)], add_gradient)

    k.strip(spec.channels, channels)


def clear(k: Kernel, dx: Pointer, size: int) -> None:
    """Set the `size` float32 elements at `dx` to zero."""

    def zeros(at: Val, mask: Val | None) -> None:
        dx.store(k.zeros(F32, k.lanes), at, mask)

    k.strip(size, zeros)
