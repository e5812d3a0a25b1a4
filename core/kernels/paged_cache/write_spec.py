"""CacheWrite: rows of tokens go to their places in the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.nest import has_plannable_types


@dataclass(frozen=True)
class CacheWriteSpec(KernelSpec):
    """pages [count, heads, page, size], or if `transposed` [count, heads, size, page], of `dtype`; `tokens` rows.

    Rows are float32, those for int8 pages int8. The result may lie in the memory of the pages: then nothing but the
    rows is written. Otherwise the kernel copies all pages first. A slot out of range sets `Status.INDEX_OUT_OF_RANGE`,
    and its row is skipped.
    """

    family: ClassVar[str] = "cache_write"
    generator: ClassVar[str] = "paged_cache.write_cpu"
    dtype: DType
    tokens: Dim
    count: int
    heads: int
    page: int
    size: int
    transposed: bool

    @property
    def row_dtype(self) -> DType:
        return DType.INT8 if self.dtype is DType.INT8 else DType.FLOAT32

    @property
    def summary(self) -> str:
        return f"rows of {self.heads}x{self.size} to pages of {self.page} in place"


def cache_write(request: Request) -> KernelCall | None:
    """Selector of CacheWrite for a cache of float32, float16, bfloat16 or int8 whose extents are numbers above 0.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    pages, rows, _ = (node.required_input(index) for index in range(3))
    known = [extent for extent in pages.shape if isinstance(extent, int) and extent]
    if not has_plannable_types(node) or len(known) < len(pages.shape):
        return None
    count, heads, page, size = known
    transposed = bool(node.attrs.get("transposed"))
    if transposed:
        page, size = size, page
    spec = CacheWriteSpec(pages.dtype, rows.shape[0], count, heads, page, size, transposed)
    written = product(rows.shape)
    operands = (In(0), In(1), In(2), Out())
    return KernelCall(
        spec, operands, inplace=(0,), flops=written, bytes=written * (rows.dtype.itemsize + pages.dtype.itemsize)
    )
