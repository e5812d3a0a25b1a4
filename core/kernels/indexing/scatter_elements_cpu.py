"""ScatterElements along one axis: a task owns one index of the outer axes."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import for_each_vector, has_masks
from lathe.core.kernels.indexing.scatter_cpu import check_index, combiner
from lathe.core.kernels.indexing.scatter_spec import ScatterElementsSpec
from lathe.core.kernels.target import Target


def generate(spec: ScatterElementsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    indices, updates, y = k.operand(0, spec.index), k.operand(1, spec.dtype), k.operand(2, spec.dtype)
    x = None if spec.cleared else k.operand(3, spec.dtype)
    extent, count, inner = k.dim(spec.extent), k.dim(spec.count), k.dim(spec.inner)
    lanes, join = target.vector_bytes // spec.dtype.itemsize, combiner(k, spec.reduction)
    with k.tasks(k.dim(spec.outer)) as task:
        whole = y.at(task * extent * inner)

        def begin(i: Val, lanes: int, mask: Val | None) -> None:
            value = k.zeros(spec.dtype, lanes) if x is None else x.at(task * extent * inner).load(i, lanes, mask)
            whole.store(value, i, mask)

        for_each_vector(k, extent * inner, begin, lanes, has_masks(target, [spec.dtype.itemsize]))
        with k.loop(0, count) as position, k.loop(0, inner) as place:
            at = (task * count + position) * inner + place
            index, valid = check_index(k, indices.load(at).cast(DType.INT64), extent)
            with k.when(valid):
                element = whole.at(index * inner + place)
                element.store(join(element.load(), updates.load(at)))
    return k
