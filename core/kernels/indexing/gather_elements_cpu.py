"""GatherElements: copies single elements, each by an index at the same position as the result."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import for_each_row, grain, unsigned_type
from lathe.core.kernels.indexing.gather_elements_spec import GatherElementsSpec
from lathe.core.kernels.indexing.scatter_cpu import check_index
from lathe.core.kernels.target import Target

_OPERATIONS = 40  # vector operations in the time of a load that depends on another load


def generate(spec: GatherElementsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtype = unsigned_type(spec.itemsize)
    x, indices, y = k.operand(0, dtype), k.operand(1, spec.index), k.operand(2, dtype)
    extent, step, along = k.dim(spec.extent), k.dim(spec.step), k.dim(spec.nest.strides[0][-1])

    def emit(offsets: list[Val], length: Val) -> None:
        source, place, target_row = x.at(offsets[0]), indices.at(offsets[1]), y.at(offsets[1])
        with k.loop(0, length) as i:
            index, valid = check_index(k, place.load(i).cast(DType.INT64), extent)
            with k.when(valid):
                target_row.store(source.load(index * step + i * along), i)

    for_each_row(k, spec.nest, grain(2 * spec.itemsize, _OPERATIONS), emit)
    return k
