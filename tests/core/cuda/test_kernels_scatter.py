"""Scatter on GPUs: rows and elements, every way of joining, repeated and bad indices."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.kernels.call import Status
from tests.core.cuda.gpu_kernel import GpuKernel, compiles
from tests.core.kernels.sweep import floats

REDUCTIONS = ["none", "add", "mul", "max", "min"]


def indices(*shape: int, below: int) -> Array:
    """Some of them repeated, some counted from the end."""
    return np.random.default_rng(5).integers(-below, below, shape)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows(reduction: str) -> None:
    kernel = GpuKernel("ScatterND", "float32[70,5]", "int64[n,1]", "float32[n,5]", reduction=reduction)
    for n in (1, 17, 40):
        kernel.check(floats(70, 5), indices(n, 1, below=70), floats(n, 5))
        assert not kernel.flag.any()


def test_coordinates_of_several_axes() -> None:
    kernel = GpuKernel("ScatterND", np.zeros((3, 4, 6), np.float32), "int64[n,2]", "float32[n,6]", reduction="add")
    assert kernel.call.spec.cleared
    kernel.check(indices(33, 2, below=3), floats(33, 6))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1])
def test_elements(reduction: str, axis: int) -> None:
    shape = (7, 9)
    at = (3, 9) if axis == 0 else (7, 3)
    texts = ("float32[7,9]", f"int64[{at[0]},{at[1]}]", f"float32[{at[0]},{at[1]}]")
    kernel = GpuKernel("ScatterElements", *texts, axis=axis, reduction=reduction)
    kernel.check(floats(*shape), indices(*at, below=7), floats(*at))


def test_one_line() -> None:
    kernel = GpuKernel("ScatterElements", "float32[7]", "int64[3]", "float32[3]", reduction="add")
    kernel.check(floats(7), indices(3, below=7), floats(3))
    row = GpuKernel("ScatterND", "float32[1]", "int64[1,1]", "float32[1]", reduction="add")
    row.check(floats(1), np.zeros((1, 1), np.int64), floats(1))


def test_bad_indices_are_refused() -> None:
    rows = GpuKernel("ScatterND", "float32[7,5]", "int64[n,1]", "float32[n,5]")
    [result] = rows(floats(7, 5), np.array([[7], [1]]), floats(2, 5))
    assert rows.flag[0] == Status.INDEX_OUT_OF_RANGE
    np.testing.assert_array_equal(result[[0, 2]], floats(7, 5)[[0, 2]])
    elements = GpuKernel("ScatterElements", "float32[7,5]", "int64[1,5]", "float32[1,5]")
    elements(floats(7, 5), np.array([[0, -8, 1, 2, 3]]), floats(1, 5))
    assert elements.flag[0] == Status.INDEX_OUT_OF_RANGE


def test_every_offer_agrees() -> None:
    texts = ("float32[70,33]", "int64[n,1]", "float32[n,33]")
    for rank in range(GpuKernel("ScatterND", *texts).offers):
        GpuKernel("ScatterND", *texts, reduction="add", rank=rank).check(
            floats(70, 33), indices(9, 1, below=70), floats(9, 33)
        )


def test_compiles() -> None:
    compiles("ScatterND", np.zeros((3000, 384), np.float32), "int64[n,1]", "float32[n,384]", reduction="add")
    compiles("ScatterElements", "float32[7,9]", "int64[7,3]", "float32[7,3]", axis=1, reduction="max")
