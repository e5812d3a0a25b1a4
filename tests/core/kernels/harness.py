"""Runs the kernel of one node on arrays, without a plan or a session.

    kernel = NodeKernel("Relu", TensorType(DType.FLOAT32, (symbol("n"), 7)))
    [y] = kernel(x)                 # any n, the same compiled code
    kernel.check(x, threads=3)      # against the reference executor

An inaccessible page follows every operand, so an access beyond it crashes. Outputs also have a canary in front.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lathe.core.codegen.jit import Library
from lathe.core.codegen.lang import symbol_of
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Block, In, KernelCall, Out, Packed, Request, Scratch
from lathe.core.kernels.choose import select
from lathe.core.kernels.cpu import object_for
from lathe.core.kernels.shared.runtime_numbers import with_runtime_numbers
from lathe.core.kernels.target import Target
from lathe.core.reference import bind_symbols, interpret
from tests.core.targets import vectors

_PAGE = mmap.PAGESIZE
_CANARY = 64
# Bytes between an operand and its inaccessible page. QEMU 7.2 reads whole vectors even if a mask excludes lanes; by
# Intel's manual (VMASKMOV) excluded lanes do not fault, and CPUs comply. Only `make test-haswell` sets this.
_SLACK = int(os.environ.get("LATHE_TEST_SLACK", "0"))
_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_libc = ctypes.CDLL(None, use_errno=True)


class NodeKernel:
    """One node and its kernel, compiled for a target (default: the host without matrix tiles).

    A `TensorType` argument is an input, an array is a constant.
    """

    def __init__(
        self,
        op: str,
        *inputs: TensorType | Array | None,
        outputs: int = 1,
        target: Target | None = None,
        threads: int = 1,
        **attrs: Any,
    ) -> None:
        self.graph = single_node(op, *inputs, outputs=outputs, **attrs)
        self.node = self.graph.nodes[0]
        self.target = target or vectors()
        call = select(Request(self.node, self.graph.constants, self.target, threads))
        if call is None:
            raise LookupError(f"no kernel covers {self.graph}")
        self.status = 0
        self.note_run(call)

    def note_run(self, call: KernelCall) -> None:
        """Use this candidate kernel of the node from now on."""
        self.call: KernelCall = call
        self.library_version = _library(call.code, self.target)
        self.native = _NATIVE(self.library_version.address(symbol_of(call.code)))

    def __call__(self, *arrays: Array, threads: int = 1) -> list[Array]:
        """The outputs, computed by `threads` threads that share one counter; `status` is the kernel's status word."""
        n = bind_symbols(self.graph.inputs, dict(zip(self.graph.inputs, arrays, strict=True))).get("n", 1)
        feeds = dict(zip(self.graph.inputs, arrays, strict=True)) | self.graph.constants
        outputs = [guarded_output(value, n) for value in self.node.outputs]
        memory = [self._memory(operand, feeds, outputs, n, threads) for operand in self.call.operands]
        self._run(memory, n, threads)
        if not all(output.untouched_in_front() for output in outputs):
            raise AssertionError(f"{self.node} wrote in front of its output")
        return [output.array for output in outputs]

    def check(self, *arrays: Array, threads: int = 1, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """AssertionError if the kernel or its dynamic-shape code differs from the reference executor."""
        names = [value.name for value in self.graph.inputs]
        expected = interpret(self.graph, dict(zip(names, arrays, strict=True)))
        general, made = with_runtime_numbers(self.call, self.target), self.call
        for call in filter(None, (general, made)):
            self.note_run(call)
            for value, actual in zip(self.node.outputs, self(*arrays, threads=threads), strict=True):
                np.testing.assert_allclose(actual, expected[value.name], rtol=rtol, atol=atol, err_msg=str(self.node))

    def _memory(
        self, operand: Any, feeds: dict[Value, Array], outputs: Sequence[Output], n: int, threads: int
    ) -> np.ndarray[Any, Any]:
        match operand:
            case In(index):
                return guarded(feeds[self.node.inputs[index]])
            case Out(index):
                return outputs[index].array
            case Packed(index, _, pack):
                return guarded(pack(feeds[self.node.inputs[index]]), align=64)
            case Block(_, data):
                return guarded(data, align=64)
            case Scratch(nbytes, shared):
                return guarded(np.zeros(evaluate(nbytes, {"n": n}) * (1 if shared else threads), np.uint8), align=64)
        raise TypeError(f"unknown operand {operand}")

    def _run(self, memory: Sequence[np.ndarray[Any, Any]], n: int, threads: int) -> None:
        addresses = np.array([array.ctypes.data for array in memory], np.uint64)
        counter = np.zeros(8, np.int64)
        arguments = (addresses.ctypes.data, n)
        team = [
            threading.Thread(target=self.native, args=(*arguments, tid, threads, counter.ctypes.data))
            for tid in range(1, threads)
        ]
        for thread in team:
            thread.start()
        self.native(*arguments, 0, threads, counter.ctypes.data)
        for thread in team:
            thread.join()
        self.status = int(counter[1])


def scalar_body(inputs: int, write: Callable[..., Value], dtype: DType = DType.FLOAT32, *more: DType) -> Graph:
    """An epilogue that returns `write(builder, *scalars)`: `inputs` scalars of `dtype`, and one of each in `more`."""
    graph = Graph("body")
    builder = Builder(graph)
    values = [builder.input(f"x{i}", TensorType(each, ())) for i, each in enumerate([*[dtype] * inputs, *more])]
    graph.outputs = [write(builder, *values)]
    return graph


def single_node(op: str, *inputs: TensorType | Array | None, outputs: int = 1, **attrs: Any) -> Graph:
    """A graph of one node; its outputs are the graph's."""
    graph = Graph("test")
    builder = Builder(graph)
    values = [_value(builder, i, given) for i, given in enumerate(inputs)]
    graph.outputs = builder.emit(op, *values, outputs=outputs, name="y", **attrs)
    return graph


def guarded(array: Array, align: int = 1) -> np.ndarray[Any, Any]:
    """A copy whose last byte (rounded up to `align`) is followed by an inaccessible page."""
    raw = np.ascontiguousarray(array)
    padded = -(-max(raw.nbytes, 1) // align) * align
    room = _ending_at_a_wall(padded)
    copy = room[: raw.nbytes].view(raw.dtype).reshape(np.shape(array)) if raw.nbytes else room
    if raw.nbytes:
        copy[...] = raw
    return copy


class Output:
    """The memory of a kernel's output."""

    def __init__(self, array: np.ndarray[Any, Any], base_bytes: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.base_bytes = base_bytes

    def untouched_in_front(self) -> bool:
        return bool((self.base_bytes[:_CANARY] == 0xA5).all())


def guarded_output(value: Value, n: int) -> Output:
    """Memory for a result, with a canary in front and an inaccessible page behind."""
    shape = value.tensor.evaluate({"n": n})
    nbytes = int(np.prod(shape)) * value.dtype.itemsize
    room = _ending_at_a_wall(_CANARY + nbytes)
    room[:] = 0xA5
    return Output(room[_CANARY:].view(value.dtype.numpy).reshape(shape), room)


def _ending_at_a_wall(nbytes: int) -> np.ndarray[Any, Any]:
    pages = -(-(nbytes + 2 * _SLACK) // _PAGE)
    region = mmap.mmap(-1, (pages + 1) * _PAGE)
    memory = np.frombuffer(region, np.uint8)
    wall = memory.ctypes.data + pages * _PAGE
    if _libc.mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(_PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    end = pages * _PAGE - _SLACK
    return memory[end - nbytes : end]


def _value(builder: Builder, index: int, given: TensorType | Array | None) -> Value | None:
    if given is None:
        return None
    if isinstance(given, TensorType):
        return builder.input(f"x{index}", given)
    return builder.constant(given, f"c{index}")


@functools.lru_cache(maxsize=64)
def _library_by_key(spec_key: str, target: Target, make: _Maker) -> Library:
    return Library({symbol_of(make.spec): object_for(make.spec, target)})


class _Maker:
    """A spec as an argument of the cached function, which compares specs by key alone."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Maker) and other.spec.key == self.spec.key

    def __hash__(self) -> int:
        return hash(self.spec.key)


def _library(spec: Any, target: Target) -> Library:
    return _library_by_key(spec.key, target, _Maker(spec))
