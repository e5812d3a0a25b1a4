"""Gather along one axis: rows picked by an index tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, axis_of
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, is_fixed_size


@dataclass(frozen=True)
class GatherSpec(KernelSpec):
    """y[outer, count, inner] = x[outer, indices[count], inner]; x has `extent` rows, elements of `itemsize` bytes.

    Negative indices count from the end. An index out of range sets `Status.INDEX_OUT_OF_RANGE`, and
    the row it asked for stays unwritten.
    """

    family: ClassVar[str] = "gather"
    itemsize: int
    index: DType
    outer: Dim
    extent: Dim
    count: Dim
    inner: Dim

    @property
    def summary(self) -> str:
        return f"gather({self.inner} of {self.itemsize} bytes from {self.extent})"


@covers("Gather")
def gather(request: Request) -> KernelCall | None:
    node = request.node
    x, indices = node.inputs[0], node.inputs[1]
    if x is None or indices is None or not has_plannable_types(node):
        return None
    if indices.dtype not in (DType.INT32, DType.INT64) or not is_fixed_size(x.dtype):
        return None
    axis = axis_of(attribute(node, "axis"), len(x.shape))
    before, after = product(x.shape[:axis]), product(x.shape[axis + 1 :])
    spec = GatherSpec(x.dtype.itemsize, indices.dtype, before, x.shape[axis], indices.tensor.size, after)
    read_and_written = node.output.tensor.nbytes * 2 + indices.tensor.nbytes
    return KernelCall(spec, (In(0), In(1), Out()), bytes=read_and_written)
