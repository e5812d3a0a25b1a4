"""One row per sequence from tokens that lie one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.types import DType
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic

_DTYPES = (DType.FLOAT32, DType.INT64, DType.INT32)


@dataclass(frozen=True)
class SegmentReduceSpec(KernelSpec):
    """Y[s, c] from X[t, c] for t from `offsets[s]` to `offsets[s + 1]`, of dense X and Y; `mode` as SegmentReduce has
    it."""

    family: ClassVar[str] = "segment_reduce"
    columns: int
    mode: str
    dtype: DType

    @property
    def summary(self) -> str:
        return f"{self.mode} of {self.columns} columns over each sequence"


@covers("SegmentReduce")
def segment_reduce(request: Request) -> KernelCall | None:
    """None where tokens do not lie along the outermost axis, and for a mean of integers."""
    node = request.node
    x, mode = node.inputs[0], str(node.attrs["mode"])
    if x is None or not has_plannable_types(node) or x.dtype not in _DTYPES:
        return None
    axis = int(node.attrs["axis"]) % len(x.shape)  # type: ignore[arg-type]
    columns = product(x.shape[axis + 1 :])
    if product(x.shape[:axis]) != 1 or not isinstance(columns, int) or columns == 0:
        return None
    if mode == "mean" and not x.dtype.is_float:
        return None
    spec = SegmentReduceSpec(columns, mode, x.dtype)
    return KernelCall(spec, (In(0), In(1), Out()), flops=x.tensor.size, bytes=traffic(node))
