"""Running sums along any axis on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, axis_of, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers, offers
from core.kernels.catalog.cuda.lines import NUMBERS, LineTile, covering, middle_axis
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.nest import has_plannable_types, traffic


@dataclass(frozen=True)
class CumulativeSpec(KernelSpec):
    """Each element of [outer, length, inner] becomes the sum of those up to it along the middle axis: without itself if
    `exclusive`, from the end if `reverse`. A program has some lines, and goes along them piece by piece."""

    family: ClassVar[str] = "cumulative"
    dtype: DType
    outer: Dim
    length: Dim
    inner: Dim
    exclusive: bool
    reverse: bool
    tile: LineTile

    @property
    def summary(self) -> str:
        return f"running sums({self.length}, {self.tile})"


@covers("CumSum", device="cuda")
def running_sums(request: Request) -> KernelCall | None:
    """None for an axis that only a run tells, and other types than numbers."""
    return next(_calls(request), None)


@offers("CumSum", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, axis = request.node, integers(request.node, "axis")
    y = node.output
    known = axis is not None and all(value is None for value in node.inputs[1:])
    if axis is None or not known or not has_plannable_types(node) or y.dtype not in NUMBERS or not y.shape:
        return
    at = axis_of(axis[0], len(y.shape))
    outer, length, inner = product(y.shape[:at]), y.shape[at], product(y.shape[at + 1 :])
    exclusive, reverse = (bool(attribute(node, name)) for name in ("exclusive", "reverse"))
    for lines in covering(*middle_axis(outer, length, inner)):
        spec = CumulativeSpec(y.dtype, outer, length, inner, exclusive, reverse, lines.tile)
        grid = (blocks(outer * inner, lines.tile.rows),)
        yield KernelCall(spec, (In(0), Out()), flops=y.tensor.size, bytes=traffic(node), grid=grid)
