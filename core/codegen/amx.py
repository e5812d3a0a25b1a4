"""Matrix tiles (Intel AMX): eight registers of up to 16 rows of 64 bytes, and instructions C += A B on them.

A tile of the left factor holds rows of words as they lie in memory. Row i of a tile of the right factor holds the words
that word i of a left row is multiplied by (`lathe.core.kernels.shared.words`). Sums are 32 bits wide. Each thread that
uses tiles configures them first and releases them at the end, so that the operating system need not save their state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.llvm_ir import VOID, Constant
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType

CONFIG_BYTES = 64
_PALETTE = 1
_WIDTHS, _HEIGHTS = 16, 48  # byte offsets in the configuration: row lengths in bytes, and numbers of rows
_PRODUCTS = {DType.BFLOAT16: "tdpbf16ps", DType.FLOAT16: "tdpfp16ps", DType.UINT8: "tdpbusd"}


class Shape(NamedTuple):
    """The shape of a tile register: `rows` rows of `words` 32-bit words each."""

    rows: Val | int
    words: int  # per row


def configure(k: Kernel, shapes: Sequence[Shape], memory: Pointer) -> None:
    """Set the shapes of tile registers 0, 1, ... of this thread, and clear all tiles.

    `memory` is scratch of `CONFIG_BYTES` bytes, in which the configuration is built.
    """
    config = memory.view(DType.UINT8)
    memory.view(DType.INT32).store(k.zeros(DType.INT32, CONFIG_BYTES // 4))
    config.store(k.constant(_PALETTE, DType.UINT8))
    for tile, shape in enumerate(shapes):
        config.store(k.constant(shape.words * 4, DType.UINT8), _WIDTHS + 2 * tile)
        config.store(k.index(shape.rows).cast(DType.UINT8), _HEIGHTS + tile)
    k.call("llvm.x86.ldtilecfg", VOID, [config.ir])


def release(k: Kernel) -> None:
    """Release the tiles of this thread."""
    k.call("llvm.x86.tilerelease", VOID, [])


def zero(k: Kernel, tile: int) -> None:
    k.call("llvm.x86.tilezero", VOID, [_number(tile)])


def load(k: Kernel, tile: int, source: Pointer, step: Val | int) -> None:
    """Load tile register `tile` from memory: rows of words from `source` on, `step` words apart."""
    k.call("llvm.x86.tileloadd64", VOID, [_number(tile), source.ir, (k.index(step) * 4).ir])


def store(k: Kernel, tile: int, target: Pointer, step: Val | int) -> None:
    k.call("llvm.x86.tilestored64", VOID, [_number(tile), target.ir, (k.index(step) * 4).ir])


def multiply_add(k: Kernel, element: DType, total: int, left: int, right: int) -> None:
    """Add the matrix product of tile registers `left` and `right` to register `total`.

    `element` is the type of the elements in words: bfloat16 or float16 (two per word), or uint8 in the left factor with
    int8 in the right one (four per word).
    """
    k.call(f"llvm.x86.{_PRODUCTS[element]}", VOID, [_number(tile) for tile in (total, left, right)])


def _number(tile: int) -> Constant:
    return llvm_ir.number(llvm_ir.integer(8), tile)
