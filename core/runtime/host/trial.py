"""Times kernels on operands made for them, without a plan or an arena: here on one thread of the host.

For other devices see `lathe.core.runtime.device.device_trial`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.codegen.jit import Library
from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Value
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import Block, In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from lathe.core.runtime.host.memory import address_of, aligned_bytes, aligned_words

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_SAMPLE = 200e-6  # the least seconds of a sample, so that the overhead of the clock and the call is negligible
_PATTERN = 1 << 16
_COLD = 4  # the copies of packed weights fill this number of second-level caches

SharedOperands: TypeAlias = dict[
    In | Out | Packed, list[NDArray[np.uint8]]
]  # the blocks that calls use in turn for an operand
ObjectOf: TypeAlias = Callable[[KernelSpec], bytes]


class TimedKernel(Protocol):
    """A kernel that is ready to be timed, for one batch size."""

    def seconds(self) -> float:
        """The time of one call in seconds; infinite for a kernel that cannot run here."""
        ...

    def settled(self, call: KernelCall) -> KernelCall:
        """The call, with the launch options that timing found best at this batch size."""
        ...


Trials: TypeAlias = Callable[[int], AbstractContextManager[Sequence[TimedKernel]]]  # for a batch size


class Bench(Protocol):
    """A function that loads the candidate kernels for a node, so that they can be timed on a device."""

    def __call__(self, calls: Sequence[KernelCall], request: Request) -> AbstractContextManager[Trials]:
        """Context manager: loads the candidates `calls`, and gives a function from a batch size to their trials.

        That function is a context manager, too, with one `TimedKernel` for each call, in order.
        """
        ...


def host_bench(compiled: ObjectOf) -> Bench:
    """The bench of the host, on one thread. `compiled` gives the object file of a spec."""

    @contextmanager
    def opened(calls: Sequence[KernelCall], request: Request) -> Iterator[Trials]:
        with Library({call.spec.symbol: compiled(call.spec) for call in calls}) as library:
            shared: SharedOperands = {}

            @contextmanager
            def trials(n: int) -> Iterator[Sequence[TimedKernel]]:
                for operand in [each for each in shared if not isinstance(each, Packed)]:
                    del shared[operand]  # these were made for another batch size
                yield [Trial(call, request, library.address(call.spec.symbol), n, shared) for call in calls]

            yield trials

    return opened


class Trial:
    """A kernel with memory for one batch size. Inputs hold small numbers (integers: zero), constants their values.

    Every call takes another copy of packed weights, because in a model the weights of all other nodes have passed
    through the cache between two calls.
    """

    def __init__(self, call: KernelCall, request: Request, address: int, n: int, shared: SharedOperands) -> None:
        """`address`: the address of the call's function.

        `shared` holds operands that the trials of one node have in common: inputs and outputs for a batch size, packed
        weights for all batch sizes.
        """
        self._function = _KERNEL(address)
        for operand in call.operands:
            if isinstance(operand, In | Out | Packed) and operand not in shared:
                shared[operand] = _copies_for_cold_cache(operand, request, n)
        self._blocks = [
            shared[o] if isinstance(o, In | Out | Packed) else [contents(o, request, n)] for o in call.operands
        ]
        copies = max((len(blocks) for blocks in self._blocks), default=1)
        addresses = [[address_of(block) for block in blocks] for blocks in self._blocks]
        tables = [np.array([each[i % len(each)] for each in addresses], np.int64) for i in range(copies)]
        self._tables = cycle([address_of(table) for table in tables])
        self._alive_tables = tables
        self._counter = aligned_words(8)
        self._n = n
        self._repeats = 1
        while self._sample() < _SAMPLE and self._repeats < 1 << 14:
            self._repeats *= 2

    def seconds(self) -> float:
        """The time of one call in seconds: the mean over a sample of at least 200 microseconds, or of 16384 calls."""
        return self._sample() / self._repeats

    def settled(self, call: KernelCall) -> KernelCall:
        """The call as it is: kernels of the host have no launch options."""
        return call

    def _sample(self) -> float:
        counter, tables = address_of(self._counter), self._tables
        started = time.perf_counter()
        for _ in range(self._repeats):
            self._counter[0] = 0
            self._function(next(tables), self._n, 0, 1, counter)
        return time.perf_counter() - started


def _copies_for_cold_cache(operand: Operand, request: Request, n: int) -> list[NDArray[np.uint8]]:
    """A list with the contents of an operand: one block, or for packed weights enough copies to overflow the cache."""
    block = contents(operand, request, n)
    if not isinstance(operand, Packed) or block.size == 0:
        return [block]
    return [block, *(_aligned(block) for _ in range(_COLD * request.cpu.l2_bytes // block.size))]


def contents(operand: Operand, request: Request, n: int) -> NDArray[np.uint8]:
    """The contents of an operand before a kernel runs, for a batch of `n`: aligned bytes.

    Constants, packed weights and blocks have their values, other inputs and the outputs sample values, and scratch
    memory is uninitialised. ValueError for an operand that a trial cannot have.
    """
    match operand:
        case In(index):
            constant = request.constant(index)
            return _sample_values(request.node.input(index), n) if constant is None else _aligned(constant)
        case Out(index):
            return _sample_values(request.node.outputs[index], n)
        case Packed(index, pack=pack):
            constant = request.constant(index)
            if constant is None:
                raise ValueError(
                    f"input {index} of {request.node.op} '{request.node.name}' is packed, but is not a constant"
                )
            return _aligned(pack(constant))
        case Block(_, data):
            return _aligned(data)
        case Scratch(nbytes):
            return aligned_bytes(_at(nbytes, n))
        case _:
            raise ValueError(
                f"{request.node.op} '{request.node.name}': expected inputs, outputs, constants and scratch memory as "
                f"operands of a trial, got {operand}"
            )


def _sample_values(value: Value | None, n: int) -> NDArray[np.uint8]:
    """Aligned memory for a value: floats that rise from 0 to 1 again and again, or zeros for other dtypes.

    ValueError for an absent input.
    """
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
