"""Execution of GPU kernels on NumPy arrays by Triton's interpreter, without a GPU and without compilation."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.kernels.cuda.source import Source
from lathe.core.kernels.cuda.toolchain import (
    INTERPRETER,
    LOCK,
    function_of,
    import_triton,
    is_interpreter_supported,
    triton_version,
)


class _Pointer:
    """An address in the form in which Triton takes pointer arguments: with `data_ptr` and `dtype`."""

    def __init__(self, address: int, element: str) -> None:
        self.dtype = element
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def run(source: Source, grid: Sequence[int], arrays: Sequence[Array | int], n: int) -> None:
    """Run all programs, one after the other.

    ValueError if there is not one array per operand. If the grid has no programs, nothing else happens; otherwise
    UnsupportedError without the version of Triton whose interpreter is supported, and ValueError if an array is not
    C-contiguous.
    """
    if len(arrays) != len(source.operands):
        raise ValueError(f"kernel {source.symbol} takes {len(source.operands)} operands, got {len(arrays)}")
    if 0 in grid:
        return
    import_triton()
    if not is_interpreter_supported():
        raise UnsupportedError(f"the interpreter of kernels needs Triton {INTERPRETER}x, found {triton_version()}")
    pointers = [_Pointer(_address(a), element) for a, element in zip(arrays, source.operands, strict=True)]
    with LOCK, np.errstate(all="ignore"), warnings.catch_warnings():  # infinities and NaN are no errors on a GPU
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of a maximum over NaN only
        _executor(function_of(source), tuple(grid))(*pointers, n)


def _address(array: Array | int) -> int:
    if isinstance(array, int):
        return array
    if not array.flags.c_contiguous:
        raise ValueError(f"an operand of shape {array.shape} is not dense")
    return array.ctypes.data


@functools.cache
def _rewrite(function: FunctionType) -> Any:
    """The function as rewritten by Triton, so that its interpreter can run it."""
    from triton.runtime.interpreter import FunctionRewriter

    return FunctionRewriter(function).rewrite_ast()


@functools.cache
def _executor_class() -> Any:
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    _fix_bfloat16(interpreter_builder)
    _fix_conditions(interpreter_builder)

    class Executor(GridExecutor):  # type: ignore[misc]
        """An executor that works on memory in place; Triton's own class copies tensors from and to a device."""

        def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
            return args, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            pass

    return Executor


def _executor(function: FunctionType, grid: tuple[int, ...]) -> Any:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return _executor_class()(_rewrite(function), list(names), grid)


def _fix_bfloat16(builder: Any) -> None:
    """Fix bfloat16 in Triton's interpreter, which multiplies its bits as integers and truncates instead of rounding."""
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


def _fix_conditions(builder: Any) -> None:
    """Fix conditions in Triton's interpreter: comparisons keep the type of their operands.

    A scalar condition that is broadcast to a block would become numbers, which loads and stores do not take as a mask.
    """
    from triton.runtime.interpreter import TensorHandle, tl

    splat = builder.create_splat

    def create_splat(block: Any, x: Any) -> Any:
        return splat(block, TensorHandle(x.data, tl.int1) if x.data.dtype == np.bool_ else x)

    builder.create_splat = create_splat
