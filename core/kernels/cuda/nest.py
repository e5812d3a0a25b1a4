"""Indices and offsets of a GPU program's elements in a loop nest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim
from lathe.core.kernels.cuda.source import Writer, scaled, text_of, total
from lathe.core.kernels.shared.cuda_tiling import Tiling, blocks
from lathe.core.kernels.shared.nest import Nest


@dataclass(frozen=True, slots=True)
class Place:
    """The indices of a block of elements along each loop, and their masks.

    Indices are expressions that broadcast to one block. A mask is None if the index is a scalar that is always inside.
    """

    indices: tuple[str, ...]
    masks: tuple[str | None, ...]

    def offset(self, strides: Sequence[Dim], start: Dim = 0) -> str:
        """The expression of an operand's offset in elements: its `strides` times the indices, plus `start`."""
        terms = [scaled(index, stride) for index, stride in zip(self.indices, strides, strict=True)]
        return total([*([text_of(start)] if start != 0 else []), *terms])

    def mask(self, strides: Sequence[Dim]) -> str | None:
        """A mask of the elements of an operand that are inside, in the shape of its offset.

        Loops along which the operand does not move are left out; None if no other loop has a mask.
        """
        moved = zip(self.masks, self.indices, strides, strict=True)
        masks = dict.fromkeys(mask for mask, index, stride in moved if mask and stride != 0 and index != "0")
        return " & ".join(masks) or None


def place(w: Writer, nest: Nest, tiling: Tiling, program: str) -> Place:
    """The elements that program number `program` handles."""
    return _squares(w, nest, tiling, program) if tiling.loops else _line(w, nest, tiling.sizes[0], program)


def split(w: Writer, index: str, extents: Sequence[Dim]) -> list[str]:
    """The row-major index `index` over loops of these extents, as one expression per loop."""
    indices = []
    for k in range(len(extents) - 1, 0, -1):
        extent = extents[k]
        if extent == 1:
            indices.append("0")
            continue
        indices.append(w.let(f"{index} % {text_of(extent)}", "i"))
        if product(extents[:k]) == 1:
            return [*("0" for _ in range(k)), *reversed(indices)]
        index = w.let(f"{index} // {text_of(extent)}", "i")
    return [index, *reversed(indices)]


def _line(w: Writer, nest: Nest, size: int, program: str) -> Place:
    index = w.let(f"{program} * {size} + tl.arange(0, {size})", "i")
    mask = w.let(f"{index} < {text_of(product(nest.extents))}", "inside")
    return Place(tuple(split(w, index, nest.extents)), (mask,) * nest.rank)


def _squares(w: Writer, nest: Nest, tiling: Tiling, program: str) -> Place:
    """The elements of a program for a tiling that cuts `tiling.loops` into blocks of `tiling.sizes`.

    Other loops have one iteration per program. The blocks vary fastest from program to program.
    """
    cut = dict(zip(tiling.loops, tiling.sizes, strict=True))
    order = [k for k in range(nest.rank) if k not in cut] + list(tiling.loops)
    counts = [blocks(nest.extents[k], cut[k]) if k in cut else nest.extents[k] for k in order]
    places = dict(zip(order, split(w, program, counts), strict=True))
    masks: dict[int, str] = {}
    for axis, k in enumerate(tiling.loops):
        ways = ", ".join(":" if other == axis else "None" for other in range(len(tiling.loops)))
        places[k] = w.let(f"{places[k]} * {cut[k]} + tl.arange(0, {cut[k]})[{ways}]", "i")
        masks[k] = w.let(f"{places[k]} < {text_of(nest.extents[k])}", "inside")
    loops = range(nest.rank)
    return Place(tuple(places[k] for k in loops), tuple(masks.get(k) for k in loops))
