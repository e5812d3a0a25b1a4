"""Matrix tiles (Intel AMX): eight registers of up to 16 rows of 64 bytes, and products of two added to a third.

A tile of the left factor holds words along its rows as they lie in memory; one of the right factor holds, in row i, the
words that word i of a left row meets (`core.kernels.catalog.words`). Sums are 32 bits wide. Each thread that uses tiles
configures them first and releases them at the end, so that nothing is left to be saved for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from core.codegen import assembly
from core.codegen.assembly import VOID, Constant
from core.codegen.lang import Kernel, Val
from core.codegen.registers import Pointer
from core.ir.types import DType

CONFIG_BYTES = 64
_PALETTE = 1
_WIDTHS, _HEIGHTS = 16, 48  # bytes of the configuration where those of the tiles begin
_PRODUCTS = {DType.BFLOAT16: "tdpbf16ps", DType.FLOAT16: "tdpfp16ps", DType.UINT8: "tdpbusd"}


class Shape(NamedTuple):
    """Of one tile register."""

    rows: Val | int
    words: int  # in a row


def configure(k: Kernel, shapes: Sequence[Shape], memory: Pointer) -> None:
    """Set the shapes of tiles 0, 1, ... of this thread; all tiles are zero then. `memory`: CONFIG_BYTES to use."""
    config = memory.view(DType.UINT8)
    memory.view(DType.INT32).store(k.zeros(DType.INT32, CONFIG_BYTES // 4))
    config.store(k.constant(_PALETTE, DType.UINT8))
    for tile, shape in enumerate(shapes):
        config.store(k.constant(shape.words * 4, DType.UINT8), _WIDTHS + 2 * tile)
        config.store(k.index(shape.rows).cast(DType.UINT8), _HEIGHTS + tile)
    k.call("llvm.x86.ldtilecfg", VOID, [config.ir])


def release(k: Kernel) -> None:
    """Give up all tiles of this thread."""
    k.call("llvm.x86.tilerelease", VOID, [])


def zero(k: Kernel, tile: int) -> None:
    k.call("llvm.x86.tilezero", VOID, [_number(tile)])


def load(k: Kernel, tile: int, source: Pointer, step: Val | int) -> None:
    """Fill a tile from rows that lie `step` words apart."""
    k.call("llvm.x86.tileloadd64", VOID, [_number(tile), source.ir, (k.index(step) * 4).ir])


def store(k: Kernel, tile: int, target: Pointer, step: Val | int) -> None:
    k.call("llvm.x86.tilestored64", VOID, [_number(tile), target.ir, (k.index(step) * 4).ir])


def multiply_add(k: Kernel, element: DType, total: int, left: int, right: int) -> None:
    """Add the product of two tiles to a third. `element`: see `core.codegen.dot.multiply_add`; of float16, too, a word
    holds two."""
    k.call(f"llvm.x86.{_PRODUCTS[element]}", VOID, [_number(tile) for tile in (total, left, right)])


def _number(tile: int) -> Constant:
    return assembly.number(assembly.integer(8), tile)
