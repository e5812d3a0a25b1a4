"""Reductions, global pooling, ArgMax and ArgMin."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel, positive, sweep
from tests.core.targets import each_target

KINDS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
AXES = ((1,), (3,), (1, 2), (2, 3), (1, 3), (0, 2), None)


@each_target
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_axes(target: Target, axes: tuple[int, ...] | None) -> None:
    sweep("ReduceSum", "float32[n,3,17,5]", axes=axes, keepdims=0, target=target, tolerance=1e-4)
    sweep("ReduceMax", "float32[n,3,17,40]", axes=axes, target=target, batches=(1, 3))


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_along_and_across_rows(target: Target, kind: str) -> None:
    for axis in (1, 2):
        sweep(f"Reduce{kind}", "float32[n,9,33]", axes=(axis,), target=target, sample=positive, tolerance=1e-4)


@each_target
@pytest.mark.parametrize("dtype", ["int32", "int64", "float64"])
def test_other_types(target: Target, dtype: str) -> None:
    for kind, axis in (("Sum", 1), ("Max", 2), ("Min", 1), ("Prod", 2), ("L1", 2)):
        sweep(f"Reduce{kind}", f"{dtype}[n,7,9]", axes=(axis,), target=target, batches=(5,))


@each_target
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_extremes_of_bytes(target: Target, dtype: str) -> None:
    for axis in (1, 2):
        sweep("ReduceMax", f"{dtype}[n,7,70]", axes=(axis,), target=target, batches=(5,))


@each_target
def test_log_sum_exp_of_infinities(target: Target) -> None:
    rows = floats(4, 20)
    rows[0], rows[1, 3], rows[2] = -np.inf, np.inf, 200.0
    compiled = kernel("ReduceLogSumExp", "float32[n,20]", axes=(1,), target=target)
    expected = [-np.inf, np.inf, 200 + np.log(20), np.log(np.exp(rows[3].astype(np.float64)).sum())]
    np.testing.assert_allclose(compiled(rows)[0].ravel(), expected, rtol=1e-6)


@each_target
def test_extremes_propagate_nan(target: Target) -> None:
    rows = floats(4, 40)
    rows[1, 20] = np.nan
    for axis in (0, 1):
        kernel("ReduceMax", "float32[n,40]", axes=(axis,), target=target).check(rows)


def test_long_sums_stay_accurate() -> None:
    rows = np.abs(floats(2, 300_000))
    along = kernel("ReduceSum", "float32[n,300000]", axes=(1,))(rows)[0]
    across = kernel("ReduceSum", "float32[n,2]", axes=(0,))(np.ascontiguousarray(rows.T))[0]
    expected = rows.astype(np.float64).sum(1)
    np.testing.assert_allclose(along.ravel(), expected, rtol=1e-6)
    np.testing.assert_allclose(across.ravel(), expected, rtol=1e-5)


@each_target
@pytest.mark.parametrize(("shape", "layout"), [("n,5,7,9", "NCHW"), ("n,7,9,35", "NHWC"), ("n,1,1,200", "NHWC")])
def test_global_pooling(target: Target, shape: str, layout: str) -> None:
    sweep("GlobalAveragePool", f"float32[{shape}]", layout=layout, target=target)
    sweep("GlobalMaxPool", f"float32[{shape}]", layout=layout, target=target)


@each_target
@pytest.mark.parametrize(
    ("op", "last", "dtype"), [("ArgMax", 0, "float32"), ("ArgMin", 1, "float32"), ("ArgMax", 1, "int32")]
)
def test_index_of_the_extreme(target: Target, op: str, last: int, dtype: str) -> None:
    for axis in (0, 1, -1):
        attrs = {"axis": axis, "select_last_index": last, "keepdims": 0}
        sweep(op, f"{dtype}[n,17,5]", target=target, batches=(1, 9), **attrs)  # type: ignore[arg-type]


@each_target
def test_index_of_nan(target: Target) -> None:
    rows = floats(3, 20)
    rows[1, [4, 9]] = np.nan
    for axis in (0, 1):
        kernel("ArgMax", "float32[n,20]", axis=axis, target=target).check(rows)


def test_many_results_are_split_among_threads() -> None:
    for axis in (1, 2):
        compiled = kernel("ReduceMean", "float32[n,64,48]", axes=(axis,))
        for threads in (1, 2, 3):
            compiled.check(floats(150, 64, 48), threads=threads)
