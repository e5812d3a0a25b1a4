"""Softmax and LogSoftmax: lengths around the vector and register limits, axes, masks and special numbers."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel, sweep
from tests.core.targets import each_target


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("op", ["Softmax", "GuardedSoftmax", "LogSoftmax"])
@pytest.mark.parametrize("length", [1, 3, 16, 17, 33, 128, 300])
def test_rows(target: Target, op: str, length: int) -> None:
    sweep(op, f"float32[n,{length}]", target=target)


@each_target
@pytest.mark.parametrize("shape", ["n,5,1,3", "n,17,33", "n,600,16", "n,1,7"])
def test_columns(target: Target, shape: str) -> None:
    sweep("Softmax", f"float32[{shape}]", axis=1, target=target)
    sweep("LogSoftmax", f"float32[{shape}]", axis=1, target=target)
    sweep("GuardedSoftmax", f"float32[{shape}]", axis=1, target=target)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("op", ["Softmax", "GuardedSoftmax", "LogSoftmax"])
def test_doubles(target: Target, op: str) -> None:
    for length in (1, 3, 17, 130, 600):
        sweep(op, f"float64[n,{length}]", target=target, tolerance=1e-12)
    sweep(op, "float64[n,9,21]", axis=1, target=target, tolerance=1e-12)


@each_target
def test_along_the_batch(target: Target) -> None:
    sweep("Softmax", "float32[n,5]", axis=0, target=target, batches=(1, 2, 40))
    sweep("Softmax", "float32[3,n]", axis=-1, target=target, batches=(1, 2, 40, 300))


@each_target
@pytest.mark.parametrize("length", [7, 40, 600])
def test_special_numbers(target: Target, length: int) -> None:
    rows = floats(7, length)
    rows[0, 3:] = -np.inf  # masked
    rows[1] = -np.inf
    rows[2, 2] = np.inf
    rows[3, 1] = np.nan
    rows[4] *= 1e30
    rows[5] = 88.0
    with np.errstate(invalid="ignore"):
        kernel("Softmax", f"float32[n,{length}]", target=target).check(rows)
        kernel("GuardedSoftmax", f"float32[n,{length}]", target=target).check(rows)


def test_many_rows_are_split_among_threads() -> None:
    compiled = kernel("Softmax", "float32[n,128]")
    for threads in (1, 2, 3):
        compiled.check(floats(2000, 128), threads=threads)
    assert compiled.call.inplace == (0,)
