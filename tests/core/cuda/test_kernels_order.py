"""GPU kernels that work along a line in order: running sums, and the greatest or least elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.sweep import floats

LONG = 9001  # elements, more than a program has at a time
TYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "uint32", "uint64"]
WAYS = [{}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}]


def any_numbers(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Whole ones over the whole range of integers; floats with halves, many of them equal."""
    rng = np.random.default_rng(len(shape))
    if dtype.is_float:
        return (rng.integers(-8, 9, shape) / 2).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    return rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)


@pytest.mark.parametrize("attrs", WAYS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_running_sums(attrs: dict[str, int], axis: int) -> None:
    sweep("CumSum", "float32[n,5,7]", axis=(axis,), **attrs)
    sweep("CumSum", "float32[3,17,33]", axis=(axis,), batches=(1,), **attrs)


@pytest.mark.parametrize("attrs", WAYS)
def test_running_sums_of_long_lines(attrs: dict[str, int]) -> None:
    sweep("CumSum", f"int64[n,{LONG}]", axis=(-1,), batches=(0, 2), sample=any_numbers, **attrs)
    sweep("CumSum", "int64[n,3]", axis=(0,), batches=(1, 5000), sample=any_numbers, **attrs)


@pytest.mark.parametrize("dtype", TYPES)
def test_running_sums_of_other_types(dtype: str) -> None:
    """Integers wrap around, as NumPy's do."""
    sweep("CumSum", f"{dtype}[n,37]", axis=(1,), batches=(3,), sample=any_numbers, exclusive=1, reverse=1)


def test_running_sums_of_special_numbers() -> None:
    """Sums after an infinity or NaN include it; an exclusive sum is not computed as a difference."""
    x = floats(3, 40)
    x[0, 7], x[1, 3], x[1, 9], x[2, 5] = np.inf, np.inf, -np.inf, np.nan
    for attrs in WAYS:
        GpuKernel("CumSum", "float32[n,40]", axis=(1,), **attrs).check(x)


def test_running_sums_compile() -> None:
    for dtype in ("float32", "bfloat16", "int64"):
        compiles("CumSum", f"{dtype}[n,128,30]", axis=(1,), exclusive=1)
    compiles("CumSum", f"float32[n,{LONG}]", axis=(1,), reverse=1)


def top(shape: str, count: int, **attrs: Any) -> list[GpuKernel]:
    """Every TopK kernel that the catalog offers, checked against the reference."""
    ranks = range(GpuKernel("TopK", shape, outputs=2, K=(count,), **attrs).offers)
    return [
        sweep("TopK", shape, outputs=2, K=(count,), rank=rank, sample=any_numbers, rtol=0, atol=0, **attrs)
        for rank in ranks
    ]


@pytest.mark.parametrize("count", [1, 5, 33])
@pytest.mark.parametrize("largest", [0, 1])
def test_top_of_rows(count: int, largest: int) -> None:
    kernels = top("float32[n,33]", count, largest=largest)
    assert {kernel.call.spec.ranks for kernel in kernels} == {False, True}
    assert kernels[0].call.spec.ranks is (count > 32)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_top_along_other_axes(axis: int) -> None:
    top("float32[6,5,7]", 3, axis=axis, batches=(1,))
    top("float32[n,5,7]", 3, axis=max(axis, 1), batches=(0, 1, 17))


@pytest.mark.parametrize("dtype", TYPES)
def test_top_of_other_types(dtype: str) -> None:
    for largest in (0, 1):
        top(f"{dtype}[n,19]", 4, largest=largest, batches=(3,))


def test_top_of_long_lines() -> None:
    sweep("TopK", f"float32[n,{LONG}]", outputs=2, K=(3,), batches=(2,))
    sweep("TopK", "float32[n,500]", outputs=2, K=(400,), batches=(1,))


def test_the_first_output_alone() -> None:
    sweep("TopK", "float32[n,9]", outputs=1, K=(2,))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_of_special_numbers(largest: int, dtype: Any) -> None:
    """NaN counts as the greatest, whatever its sign; zeros are equal."""
    x = np.zeros((4, 12), dtype)
    x[0, ::2], x[1, [2, 5, 9]], x[2, [3, 4]] = -0.0, (np.nan, -np.nan, np.inf), (np.inf, -np.inf)
    x[3] = np.finfo(dtype).tiny * np.arange(-6, 6)
    text = f"{DType.from_numpy(x.dtype)}[n,12]"
    for rank in range(GpuKernel("TopK", text, outputs=2, K=(6,), largest=largest).offers):
        GpuKernel("TopK", text, outputs=2, K=(6,), largest=largest, rank=rank).check(x, rtol=0, atol=0)


def test_top_compiles() -> None:
    for dtype in ("float32", "bfloat16", "int64", "float64"):
        for rank in (0, 1):
            compiles("TopK", f"{dtype}[n,1000]", outputs=2, K=(5,), rank=rank)
    for rank in (0, 1):
        compiles("TopK", f"float32[n,{LONG}]", outputs=2, K=(300,), largest=0, rank=rank)
