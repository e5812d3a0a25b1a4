"""Strided copies on a GPU: the number of a program determines which piece it copies."""

from __future__ import annotations

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.copy.cuda_spec import CopySpec
from lathe.core.kernels.copy.spec import Piece
from lathe.core.kernels.cuda.nest import place
from lathe.core.kernels.cuda.source import Source, Writer, text_of
from lathe.core.kernels.shared.cuda_tiling import Tiling, programs
from lathe.core.kernels.target import GpuTarget

UNSIGNED = {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64}


def generate(spec: CopySpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    dtype = UNSIGNED[spec.itemsize]
    pointers = [w.operand(f"p{i}", dtype) for i in range(spec.operands)]
    first: Dim = 0
    for piece, tiling in spec.pieces:
        count = programs(piece.nest, tiling)
        alone = len(spec.pieces) == 1
        condition = f"(tl.program_id(0) >= {text_of(first)}) & (tl.program_id(0) < {text_of(first + count)})"
        if alone:
            _copy(w, spec, piece, tiling, "tl.program_id(0)", pointers)
        else:
            with w.block(f"if {condition}"):
                _copy(w, spec, piece, tiling, f"(tl.program_id(0) - {text_of(first)})", pointers)
        first = first + count
    return w.source(max((tiling.warps for _, tiling in spec.pieces), default=1))


def _copy(w: Writer, spec: CopySpec, piece: Piece, tiling: Tiling, program: str, pointers: list[str]) -> None:
    here = place(w, piece.nest, tiling, program)
    source, target = piece.nest.strides
    mask = here.mask(target)
    if piece.source is None:
        value = w.let(f"tl.full((), {spec.fill}, tl.{UNSIGNED[spec.itemsize]})")
    else:
        inside = here.mask(source)
        value = w.let(
            f"tl.load({pointers[piece.source]} + {here.offset(source, piece.offsets[0])}{_also(inside)})", "x"
        )
    w.line(f"tl.store({pointers[piece.target]} + {here.offset(target, piece.offsets[1])}, {value}{_also(mask)})")


def _also(mask: str | None) -> str:
    return f", {mask}" if mask else ""
