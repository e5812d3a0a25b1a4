"""Gather on GPUs: axes, negative indices, and indices that must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.kernels.call import Status
from tests.core.cuda.gpu_kernel import GpuKernel, compiles
from tests.core.kernels.sweep import floats


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_rows(dtype: str) -> None:
    kernel = GpuKernel("Gather", floats(11, 7), f"{dtype}[n,3]")
    for n in (0, 1, 17):
        kernel.check((np.arange(3 * n).reshape(n, 3) % 22 - 11).astype(dtype))
        assert not kernel.flag.any()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes(axis: int) -> None:
    kernel = GpuKernel("Gather", "float16[n,4,3]", "int64[2]", axis=axis)
    kernel.check(floats(5, 4, 3).astype(np.float16), np.array([1, -2]))


def test_one_index_and_one_element() -> None:
    GpuKernel("Gather", floats(11, 7), "int64[1]").check(np.array([-3]))
    GpuKernel("Gather", "float32[n,4]", "int64[1]", axis=1).check(floats(5, 4), np.array([2]))
    GpuKernel("Gather", floats(11), "int64[1]").check(np.array([4]))
    compiles("Gather", floats(11), "int64[1]")


def test_bad_indices_are_refused() -> None:
    kernel = GpuKernel("Gather", floats(11, 7), "int64[n]")
    for bad in (11, -12, 1 << 40, -(1 << 40)):
        [rows] = kernel(np.array([3, bad]))
        assert kernel.flag[0] == Status.INDEX_OUT_OF_RANGE
        np.testing.assert_array_equal(rows[0], floats(11, 7)[3])


def test_compiles() -> None:
    compiles("Gather", floats(1000, 384), "int64[n,128]")
