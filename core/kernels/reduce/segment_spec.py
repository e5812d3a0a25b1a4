"""Reductions within packed sequences: one row per sequence, from tokens that lie one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_DTYPES = (DType.FLOAT32, DType.INT64, DType.INT32)


@dataclass(frozen=True)
class SegmentReduceSpec(KernelSpec):
    """Y[s, c] = the reduction of X[t, c] over the tokens t of sequence s; X and Y are row-major.

    These are the tokens from `offsets[s]` up to, but without, `offsets[s + 1]`, at least one; `offsets` is the second
    operand. `mode` is that of the operator SegmentReduce.
    """

    family: ClassVar[str] = "segment_reduce"
    generator: ClassVar[str] = "reduce.segment_cpu"
    columns: int
    mode: str
    dtype: DType

    @property
    def summary(self) -> str:
        return f"{self.mode} of {self.columns} columns over each sequence"


def segment_reduce(request: Request) -> KernelCall | None:
    """Selector of SegmentReduce of float32, int64 and int32 along the outermost axis, or one behind axes of extent 1.

    None for other types, if generated code cannot compute a dimension, if the number of elements behind the axis is not
    a positive number, and for a mean of integers.
    """
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
