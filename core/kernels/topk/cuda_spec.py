"""TopK on a GPU: the greatest or least elements along any axis, in order, with their indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of, integers
from lathe.core.kernels.shared.cuda_lines import NUMBERS, LineTile, covering, middle_axis
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_FEW = 32  # up to this number of results, finding them in turn is expected to be faster than by ranks
_RANKED = LineTile(16, 128, 4)  # by ranks: a program ranks 16 elements, and compares them with 128 at a time


@dataclass(frozen=True)
class TopKSpec(KernelSpec):
    """The first `count` elements along the middle axis of [outer, length, inner], greatest or `least` first.

    Equal elements are ordered by index; NaN is the greatest. Without `ranks`, a program has `tile.rows` lines, and
    searches `count` times for the next element. By `ranks`, a program has `tile.rows` elements of one line, and counts
    the elements that come before each.
    """

    family: ClassVar[str] = "topk"
    generator: ClassVar[str] = "topk.cuda"
    dtype: DType
    outer: Dim
    length: int
    inner: Dim
    count: int
    least: bool
    indices: bool  # whether indices (int64) are an output
    ranks: bool
    tile: LineTile

    @property
    def lines(self) -> Dim:
        return self.outer * self.inner

    @property
    def pieces(self) -> int:
        """The number of programs that share a line if results are found by ranks."""
        return -(-self.length // self.tile.rows)

    @property
    def summary(self) -> str:
        return f"top {self.count} of {self.length} {'by ranks' if self.ranks else 'in turn'}, {self.tile}"


def top(request: Request) -> KernelCall | None:
    """Selector of TopK of integers of 8 to 64 bits and floats of 16 to 64 bits, whose length and `K` are numbers.

    The length is that of the axis; `K` is above 0. None for other nodes, if `K` is an input, and if generated code
    cannot compute a dimension.
    """
    return next(_calls(request), None)


def other_kernels(request: Request) -> Iterable[KernelCall]:
    """Offers of the TopK of `top` with both algorithms and every candidate tile, the selector's own included.

    No offers for nodes that `top` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    """The kernels, preferred first: in turn for few results, by ranks for many. Ranks take quadratic time."""
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
