"""Gather of single elements: every index is looked up where the element stands."""

from __future__ import annotations

from core.codegen.lang import Kernel, Val
from core.ir.types import DType
from core.kernels.catalog.gather_elements import GatherElementsSpec
from core.kernels.cpu.nest import each_row, grain, unsigned
from core.kernels.cpu.scatter import checked
from core.kernels.target import Target

_OPERATIONS = 40  # of a vector: as long as one load that depends on another takes


def generate(spec: GatherElementsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtype = unsigned(spec.itemsize)
    x, indices, y = k.operand(0, dtype), k.operand(1, spec.index), k.operand(2, dtype)
    extent, step, along = k.dim(spec.extent), k.dim(spec.step), k.dim(spec.nest.strides[0][-1])

    def emit(offsets: list[Val], length: Val) -> None:
        source, place, target_row = x.at(offsets[0]), indices.at(offsets[1]), y.at(offsets[1])
        with k.loop(0, length) as i:
            index, valid = checked(k, place.load(i).cast(DType.INT64), extent)
            with k.when(valid):
                target_row.store(source.load(index * step + i * along), i)

    each_row(k, spec.nest, grain(2 * spec.itemsize, _OPERATIONS), emit)
    return k
