"""Pad by any widths: where each element comes from is computed while the kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import larger
from core.ir.types import Dim
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Request, covers
from core.kernels.catalog.copy import fill_bits, pad_widths
from core.kernels.catalog.nest import is_plannable, row_major, traffic


@dataclass(frozen=True, slots=True)
class PadAxis:
    """`length` places, of which those from `before` on are the `extent` elements of x, `step` apart in its memory. The
    others lie outside of x."""

    extent: Dim
    before: Dim
    length: Dim
    step: Dim

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing outside of x."""
        return self.before == 0 and self.length == self.extent

    def joined(self, inner: PadAxis) -> PadAxis | None:
        """This axis and the next one as one; None where that is not possible."""
        if not (self.is_plain and inner.is_plain and self.step == inner.step * inner.extent):
            return None
        extent = self.extent * inner.extent
        return PadAxis(extent, 0, extent, inner.step)


@dataclass(frozen=True)
class PadSpec(KernelSpec):
    """y[p] = x[p - before] along all axes, from element `first` of x on. What lies outside of x is read from where the
    mode says: "edge", "reflect" (as often as it takes) or "wrap"; for "constant" it is `fill`, a bit pattern, or None:
    the element that one more operand holds. The last axis is dense."""

    family: ClassVar[str] = "pad"
    itemsize: int
    mode: str
    axes: tuple[PadAxis, ...]
    first: Dim
    fill: int | None

    @property
    def summary(self) -> str:
        return f"pad({self.mode}, {len(self.axes)} axes)"


@covers("Pad")
def pad(request: Request) -> KernelCall | None:
    """Widths of any number, or ones that follow from sizes. The node supposes that no more is cropped than there is,
    and that something is left to be repeated; None where that is known to be wrong."""
    node, x = request.node, request.node.inputs[0]
    widths = pad_widths(node)
    if x is None or widths is None or not x.shape:
        return None
    cropped = [(larger(-before, 0), larger(-after, 0)) for before, after in widths]
    steps = row_major(x.shape)
    axes = [
        PadAxis(extent - sum(crop), larger(before, 0), length, step)
        for extent, crop, (before, _), length, step in zip(
            x.shape, cropped, widths, node.output.shape, steps, strict=True
        )
    ]
    mode = attribute(node, "mode") or "constant"
    least = 0 if mode == "constant" else 1
    if any(isinstance(axis.extent, int) and axis.extent < least for axis in axes if not axis.is_plain):
        return None
    first = sum((front * step for (front, _), step in zip(cropped, steps, strict=True)), start=_ZERO)
    fill = fill_bits(request)
    spec = PadSpec(x.dtype.itemsize, mode, _joined(axes), first, fill)
    dims = [dim for axis in spec.axes for dim in (axis.extent, axis.before, axis.length, axis.step)]
    if not all(map(is_plannable, (first, *dims))):
        return None
    operands: list[Operand] = [In(0), Out()] if fill is not None else [In(0), Out(), In(2)]
    return KernelCall(spec, tuple(operands), bytes=traffic(node))


def _joined(axes: Sequence[PadAxis]) -> tuple[PadAxis, ...]:
    """The same with as few axes as possible."""
    found = [axes[0]]
    for axis in axes[1:]:
        both = found[-1].joined(axis)
        found = [*found[:-1], both] if both is not None else [*found, axis]
    return tuple(found)


_ZERO: Dim = 0
