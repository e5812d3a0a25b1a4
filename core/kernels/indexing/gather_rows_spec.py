"""GatherND: rows selected by coordinates along several axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, is_fixed_size

_MOST_AXES = 8


@dataclass(frozen=True)
class GatherRowsSpec(KernelSpec):
    """y[b, i] = x[b, indices[b, i]], a row of `inner` elements of `itemsize` bytes, for i < `count`.

    x is [batch, *extents, inner], `indices` [batch, count, len(extents)] and y [batch, count, inner]. Negative
    coordinates count from the end. A coordinate out of range sets `Status.INDEX_OUT_OF_RANGE`, and its row of y is not
    written; the other rows are.
    """

    family: ClassVar[str] = "gather_rows"
    generator: ClassVar[str] = "indexing.gather_rows_cpu"
    itemsize: int
    index: DType
    batch: Dim
    extents: tuple[Dim, ...]
    count: Dim
    inner: Dim

    @property
    def summary(self) -> str:
        return f"gather({self.inner} of {self.itemsize} bytes by {len(self.extents)} coordinates)"


def gather_rows(request: Request) -> KernelCall | None:
    """Selector of GatherND of elements of 1, 2, 4 or 8 bytes, by one to eight int32 or int64 coordinates.

    None for other nodes, if generated code cannot compute a dimension, and if x and the indices have different extents
    along the batch axes.
    """
    node = request.node
    x, indices = node.inputs[0], node.inputs[1]
    if x is None or indices is None or not has_plannable_types(node) or not is_fixed_size(x.dtype):
        return None
    batch, depth = int(attribute(node, "batch_dims")), indices.shape[-1]
    if indices.dtype not in (DType.INT32, DType.INT64) or not isinstance(depth, int) or not 1 <= depth <= _MOST_AXES:
        return None
    if x.shape[:batch] != indices.shape[:batch]:
        return None
    extents, inner = x.shape[batch : batch + depth], product(x.shape[batch + depth :])
    count = product(indices.shape[batch:-1])
    spec = GatherRowsSpec(x.dtype.itemsize, indices.dtype, product(x.shape[:batch]), extents, count, inner)
    moved = node.output.tensor.nbytes * 2 + indices.tensor.nbytes
    return KernelCall(spec, (In(0), In(1), Out()), bytes=moved)
