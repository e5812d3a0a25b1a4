"""Pad by any widths: the kernel computes the source of each element at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import maximum
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request
from lathe.core.kernels.copy.spec import fill_bits, pad_widths
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import is_plannable, row_major, traffic


@dataclass(frozen=True, slots=True)
class PadAxis:
    """An axis of `length` places: from place `before` on lie the `extent` elements of x, the others lie outside of x.

    The elements of x are `step` apart in memory.
    """

    extent: Dim
    before: Dim
    length: Dim
    step: Dim

    @property
    def is_plain(self) -> bool:
        """Whether no place lies outside of x."""
        return self.before == 0 and self.length == self.extent

    def merge_with(self, inner: PadAxis) -> PadAxis | None:
        """This axis and the next one, `inner`, merged; None if one has places outside of x, or memory has gaps."""
        if not (self.is_plain and inner.is_plain and self.step == inner.step * inner.extent):
            return None
        extent = self.extent * inner.extent
        return PadAxis(extent, 0, extent, inner.step)


@dataclass(frozen=True)
class PadSpec(KernelSpec):
    """y[p] = x[p - before] along all axes, from element `first` of x on; the last axis is contiguous.

    Places outside of x are read by the mode "edge", "reflect" (repeated as often as needed) or "wrap". For "constant"
    they are `fill`, a bit pattern; if that is None, a further operand holds the element.
    """

    family: ClassVar[str] = "pad"
    generator: ClassVar[str] = "copy.pad_cpu"
    itemsize: int
    mode: str
    axes: tuple[PadAxis, ...]
    first: Dim
    fill: int | None

    @property
    def summary(self) -> str:
        return f"pad({self.mode}, {len(self.axes)} axes)"


def pad(request: Request) -> KernelCall | None:
    """Selector of Pad of elements of 1, 2, 4 or 8 bytes by any widths that are not inputs, but may depend on sizes.

    The node assumes that cropping leaves an extent of at least 0, or of at least 1 in modes that repeat elements
    (`Pad.supposes`). None if the extent is known to be less, for scalars, if generated code cannot compute a dimension,
    and for other nodes.
    """
    node, x = request.node, request.node.inputs[0]
    widths = pad_widths(node)
    if x is None or widths is None or not x.shape:
        return None
    cropped = [(maximum(-before, 0), maximum(-after, 0)) for before, after in widths]
    steps = row_major(x.shape)
    axes = [
        PadAxis(extent - sum(crop), maximum(before, 0), length, step)
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
    spec = PadSpec(x.dtype.itemsize, mode, _merge_axes(axes), first, fill)
    dims = [dim for axis in spec.axes for dim in (axis.extent, axis.before, axis.length, axis.step)]
    if not all(map(is_plannable, (first, *dims))):
        return None
    operands: list[Operand] = [In(0), Out()] if fill is not None else [In(0), Out(), In(2)]
    return KernelCall(spec, tuple(operands), bytes=traffic(node))


def _merge_axes(axes: Sequence[PadAxis]) -> tuple[PadAxis, ...]:
    """The axes with adjacent plain axes merged."""
    found = [axes[0]]
    for axis in axes[1:]:
        both = found[-1].merge_with(axis)
        found = [*found[:-1], both] if both is not None else [*found, axis]
    return tuple(found)


_ZERO: Dim = 0
