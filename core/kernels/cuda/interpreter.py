"""Kernels on NumPy arrays, by Triton's interpreter, without a GPU and without compiling."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np

from core.errors import UnsupportedError
from core.ir.graph import Array
from core.kernels.cuda.source import Source
from core.kernels.cuda.toolchain import INTERPRETER, LOCK, function_of, interprets, module, triton_version


class _Pointer:
    """An address, as Triton reads arguments that point to elements: by `data_ptr` and `dtype`."""

    def __init__(self, address: int, element: str) -> None:
        self.dtype = element
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def run(source: Source, grid: Sequence[int], arrays: Sequence[Array | int], n: int) -> None:
    """All programs, one after the other. ValueError for arrays that are not dense, or not one for each operand."""
    if len(arrays) != len(source.operands):
        raise ValueError(f"kernel {source.symbol} takes {len(source.operands)} operands, got {len(arrays)}")
    if 0 in grid:
        return
    module()
    if not interprets():
        raise UnsupportedError(f"the interpreter of kernels needs Triton {INTERPRETER}x, found {triton_version()}")
    pointers = [_Pointer(_address(a), element) for a, element in zip(arrays, source.operands, strict=True)]
    with LOCK, np.errstate(all="ignore"), warnings.catch_warnings():  # as on a GPU: infinities and NaN are no errors
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy's maximum over nothing but NaN
        _executor(function_of(source), tuple(grid))(*pointers, n)


def _address(array: Array | int) -> int:
    if isinstance(array, int):
        return array
    if not array.flags.c_contiguous:
        raise ValueError(f"an operand of shape {array.shape} is not dense")
    return array.ctypes.data


@functools.cache
def _rewritten(function: FunctionType) -> Any:
    """The function as the interpreter runs it."""
    from triton.runtime.interpreter import FunctionRewriter

    return FunctionRewriter(function).rewrite_ast()


@functools.cache
def _executor_class() -> Any:
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    _teach_bfloat16(interpreter_builder)
    _teach_conditions(interpreter_builder)

    class Executor(GridExecutor):  # type: ignore[misc]
        """Works on memory in place: Triton's own class copies tensors from and to a device."""

        def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
            return args, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            pass

    return Executor


def _executor(function: FunctionType, grid: tuple[int, ...]) -> Any:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return _executor_class()(_rewritten(function), list(names), grid)


def _teach_bfloat16(builder: Any) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were integers, and cuts instead of rounding."""
    from triton.runtime.interpreter import TensorHandle, tl

    cast, dot = builder.cast_impl, builder.create_dot

    def widened(x: Any) -> Any:
        return cast(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def cast_impl(x: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16 or x.dtype.scalar != tl.float32:
            return cast(x, to)
        return TensorHandle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), to.scalar)

    builder.cast_impl = cast_impl
    builder.create_dot = lambda a, b, total, *options: dot(widened(a), widened(b), total, *options)


def _teach_conditions(builder: Any) -> None:
    """What Triton's interpreter compares keeps the type of what was compared, so one condition spread over a block
    turns into numbers, which no load or store takes for a mask."""
    from triton.runtime.interpreter import TensorHandle, tl

    splat = builder.create_splat

    def create_splat(block: Any, x: Any) -> Any:
        return splat(block, TensorHandle(x.data, tl.int1) if x.data.dtype == np.bool_ else x)

    builder.create_splat = create_splat
