"""Gather: copies rows by vectors, as an index tensor selects them."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks, unsigned_type
from lathe.core.kernels.indexing.gather_spec import GatherSpec
from lathe.core.kernels.indexing.scatter_cpu import check_index
from lathe.core.kernels.target import Target


def generate(spec: GatherSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtype = unsigned_type(spec.itemsize)
    x, indices, y = k.operand(0, dtype), k.operand(1, spec.index), k.operand(2, dtype)
    extent, count, inner = k.dim(spec.extent), k.dim(spec.count), k.dim(spec.inner)
    lanes = 1 if spec.inner == 1 else target.vector_bytes // spec.itemsize
    steps = k.index(grain(2 * spec.itemsize)) // k.ops.max(inner, 1)
    with even_chunks(k, k.dim(spec.outer) * count, steps) as (start, stop), k.loop(start, stop) as row:
        place, position = (k.index(0), row) if spec.outer == 1 else (row // count, row % count)
        index, valid = check_index(k, indices.load(position).cast(DType.INT64), extent)
        source, target_row = x.at((place * extent + index) * inner), y.at(row * inner)

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            target_row.store(source.load(i, lanes, mask), i, mask)

        with k.when(valid):
            for_each_vector(k, inner, step, lanes, has_masks(target, [spec.itemsize]), unroll=1 if lanes == 1 else 4)
    return k
