"""The greatest or least elements along any axis on a GPU, in order, with their indices."""

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

_FEW = 32  # results that are found faster one after the other than by counting
_RANKED = LineTile(16, 128, 4)  # elements whose ranks a program counts, and others that it meets at a time


@dataclass(frozen=True)
class TopKSpec(KernelSpec):
    """The first `count` of the middle axis of [outer, length, inner], greatest or `least` first, of equals the one of
    the smaller index first; NaN is greatest.

    In turn: a program has `tile.rows` lines, and looks `count` times for the next one. By `ranks`: a program has
    `tile.rows` elements of one line, and counts how many others come before each.
    """

    family: ClassVar[str] = "topk"
    dtype: DType
    outer: Dim
    length: int
    inner: Dim
    count: int
    least: bool
    indices: bool  # whether those are wanted, too, int64
    ranks: bool
    tile: LineTile

    @property
    def lines(self) -> Dim:
        return self.outer * self.inner

    @property
    def pieces(self) -> int:
        """Programs that share a line, by ranks."""
        return -(-self.length // self.tile.rows)

    @property
    def summary(self) -> str:
        return f"top {self.count} of {self.length} {'by ranks' if self.ranks else 'in turn'}, {self.tile}"


@covers("TopK", device="cuda")
def top(request: Request) -> KernelCall | None:
    """None for numbers of elements or results that only a run tells, for no results, and for types of no numbers."""
    return next(_calls(request), None)


@offers("TopK", device="cuda")
def other_ways(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    """Few results are found in turn; many by ranks, which take time with the square of the length."""
    node, count = request.node, integers(request.node, "K")
    x = node.inputs[0]
    if x is None or count is None or not has_plannable_types(node) or any(value for value in node.inputs[1:]):
        return
    if x.dtype not in NUMBERS or not isinstance(count[0], int) or count[0] < 1:
        return
    at = axis_of(attribute(node, "axis"), len(x.shape))
    outer, length, inner = product(x.shape[:at]), x.shape[at], product(x.shape[at + 1 :])
    if not isinstance(length, int):
        return
    least, few = not attribute(node, "largest"), count[0] <= _FEW
    tiles = [lines.tile for lines in covering(*middle_axis(outer, length, inner))]
    for ranks, tile in sorted([(True, _RANKED), *((False, tile) for tile in tiles)], key=lambda way: way[0] is few):
        spec = TopKSpec(x.dtype, outer, length, inner, count[0], least, len(node.outputs) > 1, ranks, tile)
        grid = (spec.lines * spec.pieces,) if ranks else (blocks(spec.lines, tile.rows),)
        yield KernelCall(
            spec,
            (In(0), *(Out(i) for i in range(len(node.outputs)))),
            flops=x.tensor.size * count[0],
            bytes=traffic(node),
            grid=grid,
        )
