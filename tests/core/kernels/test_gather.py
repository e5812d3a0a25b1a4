"""Gather: picked rows, and indices that must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel, normal, sweep
from tests.core.targets import each_target

ROWS = 20


def _sample(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Indices of either sign among `ROWS` rows; any other type as usual."""
    if dtype in (DType.INT32, DType.INT64):
        return np.random.default_rng(len(shape)).integers(-ROWS, ROWS, shape).astype(dtype.numpy)
    return normal(dtype, shape)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("width", [1, 17, 384])
def test_embedding(target: Target, dtype: str, width: int) -> None:
    sweep("Gather", f"{dtype}[{ROWS},{width}]", "int64[n,5]", target=target, sample=_sample)


@each_target
def test_other_axes_and_index_types(target: Target) -> None:
    sweep("Gather", f"float32[n,{ROWS},17]", "int32[3]", axis=1, target=target, sample=_sample)
    sweep("Gather", f"float32[n,{ROWS}]", "int64[2,n]", axis=-1, target=target, sample=_sample)
    sweep("Gather", "float32[n,5,7]", np.asarray(-1), axis=1, target=target)


@each_target
@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, 2**40, -(2**62)])
def test_index_out_of_range_is_refused(target: Target, index: int) -> None:
    compiled = kernel("Gather", f"float32[{ROWS},17]", "int64[n]", target=target)
    table = floats(ROWS, 17)
    [y] = compiled(table, np.array([3, index, -1]))
    assert compiled.status == Status.INDEX_OUT_OF_RANGE
    np.testing.assert_array_equal(y[[0, 2]], table[[3, -1]])


def test_many_rows_are_split_among_threads() -> None:
    compiled = kernel("Gather", "float32[1000,384]", "int64[n]")
    picks = np.random.default_rng(0).integers(0, 1000, 3000)
    for threads in (1, 2, 3):
        compiled.check(floats(1000, 384), picks, threads=threads)
