"""Running sums and products along any axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, axis_of, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64})


@dataclass(frozen=True)
class CumulativeSpec(KernelSpec):
    """Each element of [outer, length, inner] becomes the sum, or the product, of those up to it along the middle axis:
    without itself if `exclusive`, from the end if `reverse`."""

    family: ClassVar[str] = "cumulative"
    dtype: DType
    outer: Dim
    length: Dim
    inner: Dim
    multiplies: bool
    exclusive: bool
    reverse: bool

    @property
    def summary(self) -> str:
        return f"running {'products' if self.multiplies else 'sums'}({self.length})"


@covers("CumSum", "CumProd")
def cumulative(request: Request) -> KernelCall | None:
    """None for an axis that only a run tells, and other types than numbers."""
    node, axis, y = request.node, integers(request.node, "axis"), request.node.output
    if axis is None or node.input(1) is not None or not has_plannable_types(node) or y.dtype not in _DTYPES:
        return None
    if not y.shape:
        return None
    at = axis_of(axis[0], len(y.shape))
    outer, length, inner = product(y.shape[:at]), y.shape[at], product(y.shape[at + 1 :])
    exclusive, reverse = (bool(attribute(node, name)) for name in ("exclusive", "reverse"))
    spec = CumulativeSpec(y.dtype, outer, length, inner, node.op == "CumProd", exclusive, reverse)
    return KernelCall(spec, (In(0), Out()), flops=y.tensor.size, bytes=traffic(node))
