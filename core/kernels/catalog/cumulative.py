"""Running sums and products along any axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, axis_of, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64})


@dataclass(frozen=True)
class CumulativeSpec(KernelSpec):
    """Each element becomes the sum, or the product, of those up to it along an axis: without itself if `exclusive`,
    from the end if `reverse`. A known axis is the middle one of three `extents`; else the second operand says which of
    them it is, a number of the type `axis`, or that it is none (`Status.AXIS_OUT_OF_RANGE`)."""

    family: ClassVar[str] = "cumulative"
    dtype: DType
    extents: tuple[Dim, ...]
    multiplies: bool
    exclusive: bool
    reverse: bool
    axis: DType | None = None

    @property
    def summary(self) -> str:
        what = f"running {'products' if self.multiplies else 'sums'}"
        return f"{what}({self.extents[1]})" if self.axis is None else f"{what} along any axis"


@covers("CumSum", "CumProd")
def cumulative(request: Request) -> KernelCall | None:
    """None for other types than numbers."""
    node, axis, y = request.node, integers(request.node, "axis"), request.node.output
    fed = node.input(1)
    if (axis is None) == (fed is None) or not has_plannable_types(node) or y.dtype not in _DTYPES or not y.shape:
        return None
    extents = y.shape
    operands: tuple[Operand, ...] = (In(0), Out()) if fed is None else (In(0), In(1), Out())
    if axis is not None:
        at = axis_of(axis[0], len(extents))
        extents = (product(extents[:at]), extents[at], product(extents[at + 1 :]))
    exclusive, reverse = (bool(attribute(node, name)) for name in ("exclusive", "reverse"))
    kind = fed.dtype if fed is not None else None
    spec = CumulativeSpec(y.dtype, extents, node.op == "CumProd", exclusive, reverse, kind)
    return KernelCall(spec, operands, flops=y.tensor.size, bytes=traffic(node))
