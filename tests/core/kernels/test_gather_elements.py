"""GatherElements and GatherND: indices along every axis, batches of rows, and what must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Request, Status
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import floats, kernel, normal, sweep, tensor
from tests.core.targets import each_target, vectors

EXTENT = 6


def _sample(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Indices of either sign below `EXTENT`; any other type as usual."""
    if dtype in (DType.INT32, DType.INT64):
        return np.random.default_rng(len(shape)).integers(-EXTENT, EXTENT, shape).astype(dtype.numpy)
    return normal(dtype, shape)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "int64"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_elements_along_every_axis(target: Target, dtype: str, index: str) -> None:
    sweep("GatherElements", f"{dtype}[n,{EXTENT}]", f"{index}[n,9]", axis=1, target=target, sample=_sample)
    sweep("GatherElements", f"{dtype}[n,{EXTENT},5]", f"{index}[n,4,5]", axis=-2, target=target, sample=_sample)
    sweep("GatherElements", f"{dtype}[{EXTENT},n]", f"{index}[2,n]", axis=0, target=target, sample=_sample)
    sweep("GatherElements", f"{dtype}[{EXTENT}]", f"{index}[n]", target=target, sample=_sample)


@each_target
def test_fewer_indices_than_elements_along_other_axes(target: Target) -> None:
    sweep("GatherElements", f"float32[4,{EXTENT},7]", "int64[3,n,5]", axis=1, target=target, sample=_sample)


def test_more_indices_than_elements_run_on_the_reference() -> None:
    for index in ("int64[5,2]", "int64[n,2]"):
        graph = single_node("GatherElements", tensor("float32[4,6]"), tensor(index), axis=1)
        assert select(Request(graph.nodes[0], graph.constants, vectors())) is None


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("inner", ["", ",1", ",17", ",n"])
def test_rows_by_coordinates(target: Target, dtype: str, inner: str) -> None:
    rows, square = f"{dtype}[{EXTENT}{inner}]", f"{dtype}[{EXTENT},{EXTENT}{inner}]"
    sweep("GatherND", rows, "int64[n,1]", target=target, sample=_sample)
    sweep("GatherND", square, "int32[n,3,2]", target=target, sample=_sample)
    sweep("GatherND", square, "int64[2]", target=target, sample=_sample)


@each_target
def test_a_batch_of_coordinates(target: Target) -> None:
    sweep("GatherND", f"float32[n,{EXTENT},3]", "int64[n,4,1]", batch_dims=1, target=target, sample=_sample)
    sweep("GatherND", f"float32[2,n,{EXTENT},{EXTENT}]", "int64[2,n,2]", batch_dims=2, target=target, sample=_sample)


@each_target
@pytest.mark.parametrize("index", [EXTENT, -EXTENT - 1, 2**40, -(2**62)])
def test_index_out_of_range_is_refused(target: Target, index: int) -> None:
    table = floats(3, EXTENT)
    elements = kernel("GatherElements", f"float32[3,{EXTENT}]", "int64[3,n]", axis=1, target=target)
    [y] = elements(table, np.array([[1, -1], [index, 2], [0, 0]]))
    assert elements.status == Status.INDEX_OUT_OF_RANGE
    np.testing.assert_array_equal(y[[0, 2]], [table[0, [1, -1]], table[2, [0, 0]]])
    rows = kernel("GatherND", f"float32[{EXTENT},{EXTENT},5]", "int64[n,2]", target=target)
    image = floats(EXTENT, EXTENT, 5)
    [y] = rows(image, np.array([[2, -1], [1, index], [index, 1]]))
    assert rows.status == Status.INDEX_OUT_OF_RANGE
    np.testing.assert_array_equal(y[0], image[2, -1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_elements_are_split_among_threads(threads: int) -> None:
    picks = np.random.default_rng(0).integers(-50, 50, (3000, 40))
    elements = kernel("GatherElements", "float32[n,50]", "int64[n,40]", axis=1)
    elements.check(floats(3000, 50), picks, threads=threads)
    kernel("GatherND", "float32[50,50,9]", "int64[n,2]").check(floats(50, 50, 9), picks[:, :2], threads=threads)
