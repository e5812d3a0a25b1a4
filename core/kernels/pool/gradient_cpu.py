"""The gradient of MaxPool for windows that do not overlap.

The first maximum of a window gets the gradient of the window's result, the other places get zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.pool.gradient_spec import PoolGradientSpec
from lathe.core.kernels.pool.sum_cpu import clear
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32


def generate(spec: PoolGradientSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, dy, dx = (k.operand(i, F32) for i in range(3))
    (height, width), (lines, columns), kernel = spec.size, spec.count, spec.kernel
    with k.parallel(k.dim(spec.batch), 1 if not spec.covered else lines) as (image, first):
        if not spec.covered:
            clear(k, dx.at(image * (height * width * spec.channels)), height * width * spec.channels)
        with k.loop(first, lines if not spec.covered else first + 1) as line, k.loop(0, columns) as column:
            corner = (image * height + line * kernel[0]) * width + column * kernel[1]
            places = [a * width + b for a in range(kernel[0]) for b in range(kernel[1])]
            seed = dy.at(((image * lines + line) * columns + column) * spec.channels)
            start = corner * spec.channels
            _window(k, spec, x.at(start), seed, dx.at(start), [place * spec.channels for place in places])
    return k


def _window(k: Kernel, spec: PoolGradientSpec, x: Pointer, seed: Pointer, dx: Pointer, places: Sequence[int]) -> None:
    def rows(at: Val, mask: Val | None) -> None:
        seen = [x.load(at + place, k.lanes, mask) for place in places]
        greatest = seen[0]
        for value in seen[1:]:
            greatest = k.ops.max(greatest, value)
        left, zero = seed.load(at, k.lanes, mask), k.zeros(F32, k.lanes)
        for place, value in zip(places, seen, strict=True):
            hit = k.ops.eq(value, greatest)
            dx.store(k.ops.select(hit, left, zero), at + place, mask)
            left = k.ops.select(hit, zero, left)

    k.strip(spec.channels, rows)
