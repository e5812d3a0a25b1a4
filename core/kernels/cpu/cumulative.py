"""Running sums and products: line by line, or as many lines at once as a vector holds neighbours."""

from __future__ import annotations

from core.codegen.lang import Kernel, Val
from core.kernels.catalog.cumulative import CumulativeSpec
from core.kernels.cpu.nest import cover, even_chunks, grain, has_masks
from core.kernels.target import Target


def generate(spec: CumulativeSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = k.operand(0, spec.dtype), k.operand(1, spec.dtype)
    length, inner = k.dim(spec.length), k.dim(spec.inner)
    lanes = 1 if spec.inner == 1 else target.vector_bytes // spec.dtype.itemsize
    neutral = 1 if spec.multiplies else 0
    steps = k.index(grain(2 * spec.dtype.itemsize)) // k.ops.max(length * inner, 1)
    with even_chunks(k, k.dim(spec.outer), steps) as (start, stop), k.loop(start, stop) as line:
        first = line * length * inner

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            with k.fold(0, length, [k.constant(neutral, spec.dtype, lanes)]) as fold:
                place = length - 1 - fold.index if spec.reverse else fold.index
                at = first + place * inner + i
                value, before = x.load(at, lanes, mask), fold.values[0]
                after = before * value if spec.multiplies else before + value
                y.store(before if spec.exclusive else after, at, mask)
                fold.values = [after]

        cover(k, inner, step, lanes, has_masks(target, [spec.dtype.itemsize]))
    return k
