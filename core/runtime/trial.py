"""Kernels on operands made for them, to be timed: no plan, no arena. Here on the host, on one thread; for other devices
see `core.runtime.device_trial`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.codegen.jit import Library
from core.ir.dim import evaluate
from core.ir.graph import Value
from core.ir.types import Dim
from core.kernels.catalog import Block, In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from core.runtime.memory import address_of, aligned_bytes, aligned_words

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_SAMPLE = 200e-6  # seconds: what a sample lasts at least, so that the clock and the call do not count
_PATTERN = 1 << 16
_COLD = 4  # second-level caches that copies of packed weights fill

Shared: TypeAlias = dict[In | Out | Packed, list[NDArray[np.uint8]]]  # what calls take in turn for an operand
ObjectOf: TypeAlias = Callable[[KernelSpec], bytes]


class Timed(Protocol):
    """A kernel that is ready to be timed, for one batch size."""

    def seconds(self) -> float:
        """The time of one call; infinite for a kernel that cannot run here."""
        ...

    def settled(self, call: KernelCall) -> KernelCall:
        """The call, with what was found out about how to run it at this batch size."""
        ...


Trials: TypeAlias = Callable[[int], AbstractContextManager[Sequence[Timed]]]  # for a batch size


class Bench(Protocol):
    """Where the candidates for a node are timed."""

    def __call__(self, calls: Sequence[KernelCall], request: Request) -> AbstractContextManager[Trials]:
        """Loads them; one trial for each call."""
        ...


def host_bench(compiled: ObjectOf) -> Bench:
    """`compiled` gives the object file of a spec."""

    @contextmanager
    def opened(calls: Sequence[KernelCall], request: Request) -> Iterator[Trials]:
        with Library({call.spec.symbol: compiled(call.spec) for call in calls}) as library:
            shared: Shared = {}

            @contextmanager
            def trials(n: int) -> Iterator[Sequence[Timed]]:
                for operand in [each for each in shared if not isinstance(each, Packed)]:
                    del shared[operand]  # made for another batch size
                yield [Trial(call, request, library.address(call.spec.symbol), n, shared) for call in calls]

            yield trials

    return opened


class Trial:
    """A kernel with memory for one batch size. Inputs hold small numbers (integers: zero), constants their values.

    Every call takes another copy of packed weights: in a model, too, those of all other nodes have passed through the
    cache since.
    """

    def __init__(self, call: KernelCall, request: Request, address: int, n: int, shared: Shared) -> None:
        """`address` is that of the call's function; what trials of one node have in common is made once in `shared`:
        inputs and outputs for a batch size, packed weights for all."""
        self._function = _KERNEL(address)
        for operand in call.operands:
            if isinstance(operand, In | Out | Packed) and operand not in shared:
                shared[operand] = _cold(operand, request, n)
        self._blocks = [
            shared[o] if isinstance(o, In | Out | Packed) else [contents(o, request, n)] for o in call.operands
        ]
        copies = max((len(blocks) for blocks in self._blocks), default=1)
        addresses = [[address_of(block) for block in blocks] for blocks in self._blocks]
        tables = [np.array([each[i % len(each)] for each in addresses], np.int64) for i in range(copies)]
        self._tables = cycle([address_of(table) for table in tables])
        self._kept = tables
        self._counter = aligned_words(8)
        self._n = n
        self._repeats = 1
        while self._sample() < _SAMPLE and self._repeats < 1 << 14:
            self._repeats *= 2

    def seconds(self) -> float:
        """The time of one call, as a mean over a sample."""
        return self._sample() / self._repeats

    def settled(self, call: KernelCall) -> KernelCall:
        """Nothing is found out here."""
        return call

    def _sample(self) -> float:
        counter, tables = address_of(self._counter), self._tables
        started = time.perf_counter()
        for _ in range(self._repeats):
            self._counter[0] = 0
            self._function(next(tables), self._n, 0, 1, counter)
        return time.perf_counter() - started


def _cold(operand: Operand, request: Request, n: int) -> list[NDArray[np.uint8]]:
    """The contents; where these are packed weights, as many copies as do not stay in the cache together."""
    block = contents(operand, request, n)
    if not isinstance(operand, Packed) or block.size == 0:
        return [block]
    return [block, *(_aligned(block) for _ in range(_COLD * request.cpu.l2_bytes // block.size))]


def contents(operand: Operand, request: Request, n: int) -> NDArray[np.uint8]:
    """What an operand holds before a kernel runs."""
    match operand:
        case In(index):
            constant = request.constant(index)
            return _filled(request.node.input(index), n) if constant is None else _aligned(constant)
        case Out(index):
            return _filled(request.node.outputs[index], n)
        case Packed(index, pack=pack):
            constant = request.constant(index)
            if constant is None:
                raise ValueError(f"input {index} of {request.node.op} '{request.node.name}' is packed, but no constant")
            return _aligned(pack(constant))
        case Block(_, data):
            return _aligned(data)
        case Scratch(nbytes):
            return aligned_bytes(_at(nbytes, n))
        case _:
            raise ValueError(f"a trial of {request.node.op} '{request.node.name}' has no {operand}")


def _filled(value: Value | None, n: int) -> NDArray[np.uint8]:
    """Memory for a value, with an even spread of numbers between 0 and 1 where it holds floats, else zeros."""
    if value is None:
        raise ValueError("a kernel reads an input that is absent")
    dtype, size = value.tensor.dtype, _at(value.tensor.nbytes, n)
    block = aligned_bytes(size)
    if not dtype.is_float:
        block[:] = 0
        return block
    pattern = np.linspace(0.0, 1.0, _PATTERN // dtype.itemsize).astype(dtype.numpy).view(np.uint8)
    for start in range(0, size, pattern.size):
        block[start : start + pattern.size] = pattern[: size - start]
    return block


def _aligned(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    block = aligned_bytes(data.size)
    block[:] = data
    return block


def _at(dim: Dim, n: int) -> int:
    return evaluate(dim, {"n": n})
