"""MapSelected as a kernel: the tape of its body runs for blocks of the rows that the mask selects.

The rows of the result are divided among the threads. Each thread has scratch memory of its own:

    counter line | flags | operands of one call | two lists of indices | rows of each source | results | arena
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.control.spec import Tape

# The most rows that the products of a block have: they reach their full speed there (256 rows of 4 to 6 rows per tile).
BLOCK = 256
BASE, MASK, RESULT = 0, 1, 2  # operands; the sources follow


@dataclass(frozen=True, slots=True)
class RowSource:
    """An input that the body reads by rows.

    `operand` is the index of its operand, `nbytes` the size of a row, `rows` the offset in scratch of the gathered
    rows. If `is_per_place`, the input has a row for each element of the mask [places, rows], otherwise one for each row
    of the result.
    """

    operand: int
    nbytes: int
    rows: int
    is_per_place: bool


@dataclass(frozen=True)
class SelectedSpec(KernelSpec):
    """Runs `tape` for at most `block` selected rows at a time, and writes or adds their results.

    The result is [rows, width] of `dtype`, the mask [places, rows]. `scratch` is the operand, `scratch_bytes` its size
    for one thread. `row_indices` and `element_indices` are offsets in it: for each row of the block, its row of the
    result, and its element of the mask. `results` is the offset of the body's results.
    """

    family: ClassVar[str] = "control"
    generator: ClassVar[str] = "control.selected_cpu"
    tape: Tape
    block: int
    scratch: int
    scratch_bytes: int
    row_indices: int
    element_indices: int
    sources: tuple[RowSource, ...]
    results: int
    rows: Dim
    places: int
    width: int
    dtype: DType
    adds: bool

    @property
    def summary(self) -> str:
        return f"native map of selected rows({len(self.tape.calls)} kernels)"
