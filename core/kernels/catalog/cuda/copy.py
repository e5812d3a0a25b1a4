"""Nodes that only move elements, on a GPU: the same strided copies as on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.types import Dim
from core.kernels.catalog import copy as on_cpu
from core.kernels.catalog.base import VIEWS, KernelCall, KernelSpec, Request, Selector, covers, offers
from core.kernels.catalog.copy import Piece
from core.kernels.catalog.cuda.tiling import Tiling, programs, tilings

_SELECTORS: dict[str, Selector] = {
    **dict.fromkeys(VIEWS, on_cpu.duplicate),
    "Transpose": on_cpu.transpose, "DepthToSpace": on_cpu.blocks, "SpaceToDepth": on_cpu.blocks,
    "Expand": on_cpu.expand, "Tile": on_cpu.tile, "Slice": on_cpu.slice_, "Concat": on_cpu.concat,
    "Split": on_cpu.split, "Pad": on_cpu.pad,
}  # fmt: skip
_OFFERED = 3


@dataclass(frozen=True)
class CopySpec(KernelSpec):
    """As `core.kernels.catalog.copy.CopySpec`; the programs of one piece come after those of the piece before."""

    family: ClassVar[str] = "copy"
    itemsize: int
    pieces: tuple[tuple[Piece, Tiling], ...]
    operands: int
    fill: int = 0

    @property
    def summary(self) -> str:
        sizes = {"x".join(map(str, tiling.sizes)) for _, tiling in self.pieces}
        return f"copy({len(self.pieces)} pieces, {' and '.join(sorted(sizes))} a program)"


@covers(*_SELECTORS, device="cuda")
def copy(request: Request) -> KernelCall | None:
    return next(_calls(request), None)


@offers(*_SELECTORS, device="cuda")
def other_tilings(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = _SELECTORS[request.node.op](request)
    if call is None or not isinstance(call.spec, on_cpu.CopySpec):
        return
    spec = call.spec
    ways = [tilings(piece.nest) for piece in spec.pieces]
    for rank in range(min([_OFFERED, *map(len, ways)])):
        pieces = tuple((piece, tiling[rank]) for piece, tiling in zip(spec.pieces, ways, strict=True))
        total: Dim = sum((programs(piece.nest, tiling) for piece, tiling in pieces), start=_NONE)
        yield replace(call, spec=CopySpec(spec.itemsize, pieces, len(call.operands), spec.fill), grid=(total,))


_NONE: Dim = 0
