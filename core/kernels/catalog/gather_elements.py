"""GatherElements: single elements picked along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from core.ir.dims import is_sized
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, axis_of
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import Nest, has_plannable_types, is_fixed_size, row_major, traffic


@dataclass(frozen=True)
class GatherElementsSpec(KernelSpec):
    """y[p] = x[p with indices[p] in place of one coordinate].

    `nest` goes over the indices; its operands are x, in which the axis has stride 0, and the indices, which lie as y
    does. An index counts `step` elements of x and has `extent` values; negative ones count from the end. One out of
    range sets `Status.INDEX_OUT_OF_RANGE`, and the element it asked for stays unwritten.
    """

    family: ClassVar[str] = "gather_elements"
    itemsize: int
    index: DType
    nest: Nest
    extent: Dim
    step: Dim

    @property
    def summary(self) -> str:
        return f"gather elements(of {self.extent})"


@covers("GatherElements")
def gather_elements(request: Request) -> KernelCall | None:
    """None where the indices might leave the tensor along another axis."""
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
    """Whether there is an element of x for each index, along all axes but the one that indices point along. Of sizes of
    a table, the types of the node suppose that."""
    more = [extent - count for at, (extent, count) in enumerate(zip(x, indices, strict=True)) if at != axis]
    return all(dim >= 0 if isinstance(dim, int) else is_sized(dim) for dim in more)
