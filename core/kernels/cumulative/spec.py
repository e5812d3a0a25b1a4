"""Cumulative sums and products along any axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of, integers
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64})


@dataclass(frozen=True)
class CumulativeSpec(KernelSpec):
    """Each element becomes the sum, or the product, of all elements up to it along an axis.

    The element itself is left out if `exclusive`; the sum runs from the end if `reverse`. A known axis is the middle
    one of three `extents`, and `axis` is None. Otherwise `extents` are those of all axes, and the second operand is the
    axis, an integer of type `axis`; an invalid one sets `Status.AXIS_OUT_OF_RANGE`.
    """

    family: ClassVar[str] = "cumulative"
    generator: ClassVar[str] = "cumulative.cpu"
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


def cumulative(request: Request) -> KernelCall | None:
    """Selector of CumSum and CumProd of float32, float64, int32 and int64, along any axis, which may be an input.

    None for other types and for scalars, and if generated code cannot compute a dimension.
    """
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
