"""Table lookups in registers: the elements of a small constant table at the indices in the low bits of words."""

from __future__ import annotations

from collections.abc import Sequence

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.shared.number_tables import first_of_count

F32, I32 = DType.FLOAT32, DType.INT32
_PERMUTE = {8: "llvm.x86.avx2.permps", 16: "llvm.x86.avx512.permvar.sf.512"}  # VPERMPS; the key is the number of lanes


class Lookup:
    """`at(words)`: for each word of 32 bits, the number whose index is in its lowest bits.

    `numbers` has a power of two of elements, at most 16. Higher bits of a word do not matter. VPERMPS is used where the
    CPU has it, except for integers a, a + 1, ... that exceed one register. Otherwise such integers are computed from
    the index, and other numbers are selected by comparisons.
    """

    def __init__(self, kernel: Kernel, numbers: Sequence[float], lanes: int) -> None:
        self._kernel, self._numbers, self._lanes = kernel, tuple(numbers), lanes
        has_permute = kernel.target.name in ("avx512", "avx2") and lanes in _PERMUTE
        self._first = first_of_count(self._numbers)
        # One instruction where a register holds the whole table; with halves of it, counting is faster.
        self._permutes = has_permute and (len(self._numbers) <= lanes or self._first is None)
        # VPERMPS reads as many bits as its table has indices: a smaller table is repeated.
        self._tables = [self._table(start) for start in range(0, len(self._numbers), lanes)] if self._permutes else []

    def at(self, words: Val) -> Val:
        k, count = self._kernel, len(self._numbers)
        if self._permutes:
            found = [self._permute(table, words) for table in self._tables]
            if len(found) == 1:
                return found[0]
            is_upper = ~k.ops.bit_and(words, self._lanes).equals(0)
            return k.ops.select(is_upper, found[1], found[0])
        index = k.ops.bit_and(words, count - 1)
        if self._first is not None:
            return (index + self._first if self._first else index).cast(F32)
        result = k.constant(self._numbers[0], F32, self._lanes)
        for i, number in enumerate(self._numbers[1:], 1):
            result = k.ops.select(index.equals(i), k.constant(number, F32, self._lanes), result)
        return result

    def _table(self, start: int) -> Val:
        part = self._numbers[start : start + self._lanes]
        repeated = [part[i % len(part)] for i in range(self._lanes)]
        type_ = llvm_ir.vector(llvm_ir.FLOAT, self._lanes)
        return Val(self._kernel, llvm_ir.numbers(type_, repeated), F32, self._lanes)

    def _permute(self, table: Val, words: Val) -> Val:
        name = _PERMUTE[self._lanes]
        return Val(self._kernel, self._kernel.call(name, table.ir.type, [table.ir, words.ir]), F32, self._lanes)
