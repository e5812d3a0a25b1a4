"""The gradient of MaxPool where windows overlap: each adds its number to its first greatest place."""

from __future__ import annotations

import math

from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType
from core.kernels.catalog.pool_gradient import PoolSumSpec
from core.kernels.cpu.conv_batch import Taps, taps
from core.kernels.target import Target

F32 = DType.FLOAT32


def generate(spec: PoolSumSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, dy, dx = (k.operand(i, F32) for i in range(3))
    lines, columns = spec.windows
    size = lines.size * columns.size * spec.channels
    with k.parallel(k.dim(spec.batch)) as (image,):
        source, result = x.at(image * size), dx.at(image * size)
        clear(k, result, size)
        with k.loop(0, lines.count) as line, k.loop(0, columns.count) as column:
            seed = dy.at(((image * lines.count + line) * columns.count + column) * spec.channels)
            _window(k, spec, source, seed, result, (taps(k, lines, 1, line), taps(k, columns, 1, column)))
    return k


def _window(k: Kernel, spec: PoolSumSpec, x: Pointer, seed: Pointer, dx: Pointer, across: tuple[Taps, Taps]) -> None:
    """One window of every channel, vector by vector."""
    lines, columns = across

    def place(down: Val, right: Val) -> Val:
        line = lines.source + down * lines.step
        return (line * spec.windows[1].size + columns.source + right * columns.step) * spec.channels

    def channels(at: Val, mask: Val | None) -> None:
        lowest = k.constant(-math.inf, F32, k.lanes)
        with k.fold(lines.first, lines.last, [lowest]) as down:
            with k.fold(columns.first, columns.last, down.values) as right:
                value = x.load(place(down.index, right.index) + at, k.lanes, mask)
                right.values = [k.ops.max(right.values[0], value)]
            down.values = right.values
        (greatest,), left = down.values, seed.load(at, k.lanes, mask)
        with k.fold(lines.first, lines.last, [left]) as down:
            with k.fold(columns.first, columns.last, down.values) as right:
                here, zero = place(down.index, right.index) + at, k.zeros(F32, k.lanes)
                hit = k.ops.eq(x.load(here, k.lanes, mask), greatest)
                dx.store(dx.load(here, k.lanes, mask) + k.ops.select(hit, right.values[0], zero), here, mask)
                right.values = [k.ops.select(hit, zero, right.values[0])]
            down.values = right.values

    k.strip(spec.channels, channels)


def clear(k: Kernel, dx: Pointer, size: int) -> None:
    """Zeros in `size` elements."""

    def zeros(at: Val, mask: Val | None) -> None:
        dx.store(k.zeros(F32, k.lanes), at, mask)

    k.strip(size, zeros)
