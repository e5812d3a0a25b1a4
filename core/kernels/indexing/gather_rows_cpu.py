"""GatherND: copies rows by vectors, as coordinates select them."""

from __future__ import annotations

from functools import reduce

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks, unsigned_type
from lathe.core.kernels.indexing.gather_rows_spec import GatherRowsSpec
from lathe.core.kernels.indexing.scatter_cpu import check_index
from lathe.core.kernels.target import Target


def generate(spec: GatherRowsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtype, depth = unsigned_type(spec.itemsize), len(spec.extents)
    x, indices, y = k.operand(0, dtype), k.operand(1, spec.index), k.operand(2, dtype)
    extents, count, inner = [k.dim(extent) for extent in spec.extents], k.dim(spec.count), k.dim(spec.inner)
    size, lanes = k.dim(product(spec.extents)), 1 if spec.inner == 1 else target.vector_bytes // spec.itemsize
    steps = k.index(grain(2 * spec.itemsize)) // k.ops.max(inner, 1)
    with even_chunks(k, k.dim(spec.batch) * count, steps) as (start, stop), k.loop(start, stop) as row:
        first = k.index(0) if spec.batch == 1 else row // count * size
        parts = [check_index(k, indices.load(row * depth + i).cast(DType.INT64), extents[i]) for i in range(depth)]
        place = k.index(0)
        for (index, _), extent in zip(parts, extents, strict=True):
            place = place * extent + index
        source, target_row = x.at((first + place) * inner), y.at(row * inner)

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            target_row.store(source.load(i, lanes, mask), i, mask)

        with k.when(reduce(lambda a, b: a & b, (valid for _, valid in parts))):
            for_each_vector(k, inner, step, lanes, has_masks(target, [spec.itemsize]), unroll=1 if lanes == 1 else 4)
    return k
