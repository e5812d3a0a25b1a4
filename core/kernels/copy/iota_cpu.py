"""Iota: integers computed from their indices, line by line along the last axis."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.copy.iota_spec import IotaSpec
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks
from lathe.core.kernels.target import Target


def generate(spec: IotaSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    y, lanes = k.operand(0, spec.dtype), target.vector_bytes // DType.INT64.itemsize
    outer, inner = spec.extents[:-1], k.dim(product(spec.extents[-1:]))
    step = k.dim(spec.steps[-1]) if spec.steps else k.index(0)
    lines = k.index(grain(spec.dtype.itemsize)) // k.ops.max(inner, 1)
    with even_chunks(k, k.dim(product(outer)), lines) as (begin, end), k.loop(begin, end) as line:
        first = k.dim(spec.start)
        for place, by in zip(k.unravel(line, [k.dim(extent) for extent in outer]), spec.steps[:-1], strict=False):
            first = first + place * k.dim(by)

        def write(i: Val, lanes: int, mask: Val | None) -> None:
            numbers = (k.lane_numbers(lanes) + i) * step + first if lanes > 1 else i * step + first
            y.store(numbers.cast(spec.dtype), line * inner + i, mask)

        for_each_vector(k, inner, write, lanes, has_masks(target, [spec.dtype.itemsize]))
    return k
