"""Calls of kernels inside a kernel: the scratch memory that they need, and the tape of a body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.control.spec import TABLE, Place, Tape, TapeCall

_STATUS, _STOP = 1, 2  # words of a step; _STOP, in steps of bodies only: the address of the outermost step's status


class Frame:
    """The scratch memory of a generated function, and the calls of kernels that it makes from there."""

    def __init__(self, k: Kernel, scratch: Pointer) -> None:
        self.k = k
        self.scratch = scratch
        self.counter = self.scratch.view(DType.INT64)
        self.counter.store(k.index(0), _STATUS)
        self._stop = self._outermost(k.counter)
        self.counter.store(Val(k, self._stop, DType.INT64), _STOP)
        self._rows, self._some_rows = k.n, k.ops.max(k.n, 1)

    @contextmanager
    def rows(self, count: Val) -> Iterator[None]:
        """Tapes that run inside get `count`, which is at least 1, as their batch size `n`."""
        before = self.k.n, self._rows, self._some_rows
        self.k.n = self._rows = self._some_rows = count
        yield
        self.k.n, self._rows, self._some_rows = before

    def own(self, offset: Dim) -> Pointer:
        return self.scratch.at(self.offset(offset))

    def offset(self, dim: Dim) -> Val:
        """The value of `dim`, an offset in scratch memory or a base; an empty batch uses the offsets of n = 1."""
        self.k.n = self._some_rows
        value = self.k.dim(dim)
        self.k.n = self._rows
        return value

    def _outermost(self, step: Pointer) -> llvm_ir.Value:
        """The address of the status word of the plan's own step, where an interrupt is written.

        `step` is the counter line of the call of this function, which a function at any depth of nesting may have made.
        """
        b, above = self.k.builder, step.load(_STOP)
        own = b.convert("ptrtoint", step.at(_STATUS).ir, llvm_ir.I64)
        return b.select(above.equals(0).ir, own, above.ir)

    def status(self) -> Val:
        return self.counter.load(_STATUS)

    def must_stop(self) -> Val:
        """Whether a kernel has rejected its data, or the run is interrupted."""
        b = self.k.builder
        status = b.convert("inttoptr", self._stop, llvm_ir.POINTER)
        stopped = Val(self.k, b.atomic("max", status, word(0)), DType.INT64)  # an atomic load, which LLVM cannot hoist
        return ~(stopped.equals(0) & self.status().equals(0))

    def run(self, tape: Tape, bases: Sequence[Pointer]) -> None:
        """Generate calls of the tape's kernels, then its moves; `bases` are the addresses of `tape.bases`, in order."""
        for call in tape.calls:
            self._call(call, bases)
        for move in tape.moves:
            self.copy(self._at(bases, move.target), self._at(bases, move.source), self.k.dim(move.nbytes))

    def copy(self, target: Pointer, source: Pointer, nbytes: Val) -> None:
        arguments = [target.ir, source.ir, nbytes.ir, llvm_ir.number(llvm_ir.I1, 0)]
        self.k.call("llvm.memcpy.p0.p0.i64", llvm_ir.VOID, arguments)

    def _call(self, call: TapeCall, bases: Sequence[Pointer]) -> None:
        k, table = self.k, self.own(TABLE)
        for index, place in enumerate(call.operands):
            k.builder.store(self._at(bases, place).ir, table.at(8 * index).ir, 8)
        self.counter.store(k.index(0))
        k.call(call.symbol, llvm_ir.VOID, [table.ir, k.n.ir, word(0), word(1), self.counter.ir])

    def _at(self, bases: Sequence[Pointer], place: Place) -> Pointer:
        return bases[place.base].at(self.offset(place.offset))


def word(value: int) -> llvm_ir.Constant:
    """A constant of 64 bits."""
    return llvm_ir.number(llvm_ir.I64, value)
