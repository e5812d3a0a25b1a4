"""Loops and branches around the kernels of a body: one thread calls these kernels one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.control.frame_cpu import Frame, word
from lathe.core.kernels.control.spec import (
    GOING,
    ITERATION,
    TRUE,
    Base,
    BranchSpec,
    Carried,
    CarriedValue,
    Operand,
    Own,
    RepeatSpec,
    Slice,
)
from lathe.core.kernels.target import Target

_FOREVER = (1 << 63) - 1


def generate(spec: RepeatSpec | BranchSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    with k.when(k.tid.equals(0)):
        frame = Frame(k, k.operand(spec.scratch, DType.UINT8))
        if isinstance(spec, RepeatSpec):
            _Repeat(frame, spec).write()
        else:
            _branch(frame, spec)
        k.refuse(frame.status())
    return k


class _Repeat:
    """A loop. Carried values alternate between two buffers; the initial values are operands of the node."""

    def __init__(self, frame: Frame, spec: RepeatSpec) -> None:
        self.frame, self.k, self.spec = frame, frame.k, spec
        fixed = {base.index for base in spec.tape.bases if isinstance(base, Operand | Slice)}
        fixed |= {index for value in spec.carried for index in (value.initial, value.final)}
        self.operands = {index: self.k.operand(index, DType.UINT8) for index in sorted(fixed)}
        self.buffers = [[frame.own(offset) for offset in value.buffers] for value in spec.carried]

    def write(self) -> None:
        limit = self._limit()
        self._begin()
        with self._while_going(limit) as iteration:
            self.frame.own(ITERATION).view(DType.INT64).store(iteration)
            bases = [self._base(base, iteration) for base in self.spec.tape.bases]
            self.frame.run(self.spec.tape, bases)
        for value, buffers in zip(self.spec.carried, self.buffers, strict=True):
            last = self._before(value, buffers, self.count)
            self.frame.copy(self.operands[value.final], last, self.k.dim(value.nbytes))

    def _limit(self) -> Val:
        spec, k = self.spec, self.k
        if spec.trips is not None:
            return k.dim(spec.trips)
        return k.index(_FOREVER) if spec.limit is None else k.operand(spec.limit, DType.INT64).load()

    def _begin(self) -> None:
        """Set the flags: the condition may forbid even the first iteration."""
        k, one = self.k, self.k.constant(1, DType.UINT8)
        begins = one if self.spec.condition is None else k.operand(self.spec.condition, DType.UINT8).load()
        self.frame.own(GOING).store(begins)
        self.frame.own(TRUE).store(one)

    @contextmanager
    def _while_going(self, limit: Val) -> Iterator[Val]:
        """Code written inside runs for each iteration, whose number is yielded; `self.count` is their count afterwards.

        The loop ends after `limit` iterations, when the flag at `GOING` is false, or when the run must stop.
        """
        b = self.k.builder
        before = b.block
        head, body, after = (b.append_block(name) for name in ("iteration", "once", "ended"))
        b.branch(head)
        b.block = head
        phi = b.phi(llvm_ir.I64)
        phi.add_incoming(word(0), before)
        self.count = Val(self.k, phi, DType.INT64)
        going = ~self.frame.own(GOING).load().equals(0) & ~self.frame.must_stop()
        b.branch_if((going & (self.count < limit)).ir, body, after)
        b.block = body
        yield self.count
        phi.add_incoming((self.count + 1).ir, b.block)
        b.branch(head)
        b.block = after

    def _base(self, base: Base, iteration: Val) -> Pointer:
        match base:
            case Operand(index):
                return self.operands[index]
            case Own(offset):
                return self.frame.own(offset)
            case Slice(index, nbytes, backward):
                row = self._limit() - 1 - iteration if backward else iteration
                return self.operands[index].at(row * self.k.dim(nbytes))
            case Carried(index, True):
                return self._select_buffer(iteration & 1, *self.buffers[index])
            case Carried(index):
                return self._before(self.spec.carried[index], self.buffers[index], iteration)

    def _before(self, value: CarriedValue, buffers: Sequence[Pointer], iteration: Val) -> Pointer:
        """The address of a carried value as iteration number `iteration` finds it: its initial value, or a buffer."""
        last = self._select_buffer((iteration + 1) & 1, *buffers)
        return self._select_buffer(iteration.equals(0), last, self.operands[value.initial])

    def _select_buffer(self, second: Val, a: Pointer, b: Pointer) -> Pointer:
        condition = second if second.dtype is DType.BOOL else second.equals(1)
        return Pointer(self.k, self.k.builder.select(condition.ir, b.ir, a.ir), DType.UINT8)


def _branch(frame: Frame, spec: BranchSpec) -> None:
    condition = frame.k.operand(0, DType.UINT8).load().equals(0)
    with frame.k.builder.if_else(condition.ir) as (no, yes):
        for block, tape in ((no, spec.other), (yes, spec.then)):
            with block:
                frame.run(tape, [_branch_base(frame, base) for base in tape.bases])


def _branch_base(frame: Frame, base: Base) -> Pointer:
    match base:
        case Operand(index):
            return frame.k.operand(index, DType.UINT8)
        case Own(offset):
            return frame.own(offset)
    raise TypeError(f"base of a branch: expected Operand or Own, got {base}")
