"""GatherElements: single elements selected along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, is_fixed_size, row_major, traffic


@dataclass(frozen=True)
class GatherElementsSpec(KernelSpec):
    """y[p] = x[p with indices[p] in place of one coordinate].

    `nest` walks the indices; its operands are x, with stride 0 along the axis, and the indices, which have the strides
    of y. Along the axis x has `extent` elements, `step` apart. Negative indices count from the end. An index out of
    range sets `Status.INDEX_OUT_OF_RANGE`, and its result is not written.
    """

    family: ClassVar[str] = "gather_elements"
    generator: ClassVar[str] = "indexing.gather_elements_cpu"
    itemsize: int
    index: DType
    nest: Nest
    extent: Dim
    step: Dim

    @property
    def summary(self) -> str:
        return f"gather elements(of {self.extent})"


def gather_elements(request: Request) -> KernelCall | None:
    """Selector of GatherElements of elements of 1, 2, 4 or 8 bytes by int32 or int64 indices, along any axis.

    None for other nodes, for scalars, if generated code cannot compute a dimension, and if the indices might have a
    larger extent than x along another axis.
    """
    node = request.node
    x, indices = node.inputs[0], node.inputs[1]
    if x is None or indices is None or not has_plannable_types(node) or not indices.shape:
        return None
    if indices.dtype not in (DType.INT32, DType.INT64) or not is_fixed_size(x.dtype):
        return None
    axis = axis_of(attribute(node, "axis"), len(x.shape))
    if not _is_inside(indices.shape, x.shape, axis):
        return None
    dense = row_major(x.shape)
    walk = (*dense[:axis], 0, *dense[axis + 1 :])
    nest = Nest(indices.shape, (walk, row_major(indices.shape))).collapsed()
    spec = GatherElementsSpec(x.dtype.itemsize, indices.dtype, nest, x.shape[axis], dense[axis])
    return KernelCall(spec, (In(0), In(1), Out()), bytes=traffic(node))


def _is_inside(indices: Sequence[Dim], x: Sequence[Dim], axis: int) -> bool:
    """Whether the shape `indices` does not exceed the shape `x` along any axis but `axis`.

    A difference that consists of dynamic dimensions (`size0`, ...) counts as not negative: the node's types assume it.
    """
    more = [extent - count for at, (extent, count) in enumerate(zip(x, indices, strict=True)) if at != axis]
    return all(dim >= 0 if isinstance(dim, int) else has_only_sizes(dim) for dim in more)
