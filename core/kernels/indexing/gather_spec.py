"""Gather along one axis: rows selected by an index tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of
from lathe.core.kernels.shared.nest import has_plannable_types, is_fixed_size


@dataclass(frozen=True)
class GatherSpec(KernelSpec):
    """y[o, c, i] = x[o, indices[c], i] for x [outer, extent, inner], `count` indices and y [outer, count, inner].

    An element has `itemsize` bytes. Negative indices count from the end. An index below -`extent` or from `extent` on
    sets `Status.INDEX_OUT_OF_RANGE`, and y[:, c] is not written for it; the rest of y is.
    """

    family: ClassVar[str] = "gather"
    generator: ClassVar[str] = "indexing.gather_cpu"
    itemsize: int
    index: DType
    outer: Dim
    extent: Dim
    count: Dim
    inner: Dim

    @property
    def summary(self) -> str:
        return f"gather({self.inner} of {self.itemsize} bytes from {self.extent})"


def gather(request: Request) -> KernelCall | None:
    """Selector of Gather of elements of 1, 2, 4 or 8 bytes by int32 or int64 indices, along any axis.

    None for other nodes, and if generated code cannot compute a dimension.
    """
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
