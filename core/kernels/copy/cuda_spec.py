"""Copies on a GPU: the same strided copies as on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.types import Dim
from lathe.core.kernels.call import VIEWS, KernelCall, KernelSpec, Request, Selector
from lathe.core.kernels.copy import spec as on_cpu
from lathe.core.kernels.copy.spec import Piece
from lathe.core.kernels.shared.cuda_tiling import Tiling, programs, tilings

SELECTORS: dict[str, Selector] = {
    **dict.fromkeys(VIEWS, on_cpu.duplicate),
    "Transpose": on_cpu.transpose, "DepthToSpace": on_cpu.blocks, "SpaceToDepth": on_cpu.blocks,
    "Expand": on_cpu.expand, "Tile": on_cpu.tile, "Slice": on_cpu.slice_, "Concat": on_cpu.concat,
    "Split": on_cpu.split, "Pad": on_cpu.pad,
}  # fmt: skip
_OFFERED = 3


@dataclass(frozen=True)
class CopySpec(KernelSpec):
    """Strided copies (`pieces`) of elements of `itemsize` bytes, each with its tiling, in one launch.

    `operands` is the number of the kernel's inputs and outputs. The numbers of a piece's programs follow those of the
    piece before. Pieces without a source write the bit pattern `fill`.
    """

    family: ClassVar[str] = "copy"
    generator: ClassVar[str] = "copy.cuda"
    itemsize: int
    pieces: tuple[tuple[Piece, Tiling], ...]
    operands: int
    fill: int = 0

    @property
    def summary(self) -> str:
        sizes = {"x".join(map(str, tiling.sizes)) for _, tiling in self.pieces}
        return f"copy({len(self.pieces)} pieces, {' and '.join(sorted(sizes))} a program)"


def copy(request: Request) -> KernelCall | None:
    """Selector of the nodes for which the CPU has a strided copy (`SELECTORS`), of elements of 1, 2, 4 or 8 bytes.

    They are Identity, Reshape, Flatten, Squeeze and Unsqueeze with memory of their own, Transpose, DepthToSpace,
    SpaceToDepth, Expand, Tile, Slice, Concat, Split and Pad. None if the CPU's selector of the node returns None, for
    example if shape, widths or sizes are inputs, or generated code cannot compute a dimension.
    """
    return next(_calls(request), None)


def other_tilings(request: Request) -> Iterable[KernelCall]:
    """Offers of the copy of `copy` with up to three tilings of each piece, the selector's own included.

    No offers for nodes that `copy` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = SELECTORS[request.node.op](request)
    if call is None or not isinstance(call.spec, on_cpu.CopySpec):
        return
    spec = call.spec
    ways = [tilings(piece.nest) for piece in spec.pieces]
    for rank in range(min([_OFFERED, *map(len, ways)])):
        pieces = tuple((piece, tiling[rank]) for piece, tiling in zip(spec.pieces, ways, strict=True))
        total: Dim = sum((programs(piece.nest, tiling) for piece, tiling in pieces), start=_NONE)
        yield replace(call, spec=CopySpec(spec.itemsize, pieces, len(call.operands), spec.fill), grid=(total,))


_NONE: Dim = 0
