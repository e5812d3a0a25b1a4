"""Scatter: rows and elements combined with the data in a fixed order; invalid indices are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Status
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel
from tests.core.kernels.sweep import floats, kernel
from tests.core.targets import each_target

ROWS = 20


def picks(*shape: int, below: int = ROWS, dtype: Any = np.int64) -> Any:
    """Indices of either sign, most of them several times."""
    return np.random.default_rng(sum(shape)).integers(-below, below, shape).astype(dtype)


@each_target
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("width", [1, 17, 64])
def test_rows(target: Target, reduction: str, width: int) -> None:
    compiled = kernel(
        "ScatterND", f"float32[{ROWS},{width}]", "int64[n,1]", f"float32[n,{width}]", target=target, reduction=reduction
    )
    for threads in (1, 3):
        compiled.check(floats(ROWS, width), picks(90, 1), floats(90, width), threads=threads)


@each_target
def test_the_last_update_of_an_element_wins(target: Target) -> None:
    compiled = kernel("ScatterND", f"int64[{ROWS},3]", "int32[n,1]", "int64[n,3]", target=target)
    compiled.check(picks(ROWS, 3), picks(50, 1, dtype=np.int32), picks(50, 3), threads=2)


@each_target
def test_coordinates_of_several_axes(target: Target) -> None:
    types = (f"float64[4,{ROWS},3]", "int64[n,7,2]", "float64[n,7,3]")
    compiled = kernel("ScatterND", *types, target=target, reduction="add")
    places = np.stack([picks(5, 7, below=4), picks(5, 7)], -1)
    compiled.check(floats(4, ROWS, 3).astype(np.float64), places, floats(5, 7, 3).astype(np.float64), threads=2)


def test_data_of_zeros_is_no_operand() -> None:
    types = (TensorType(DType.INT64, (40, 1)), TensorType(DType.FLOAT32, (40, 9)))
    compiled = NodeKernel("ScatterND", np.zeros((ROWS, 9), np.float32), *types, reduction="add")
    assert len(compiled.call.operands) == 3
    compiled.check(picks(40, 1), floats(40, 9), threads=2)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    compiled = kernel("ScatterND", "float32[7,33]", "int64[n,1]", "float32[n,33]", reduction="add")
    feeds = (floats(7, 33), picks(500, 1, below=7), floats(500, 33))
    [once], [again] = compiled(*feeds, threads=1), compiled(*feeds, threads=4)
    np.testing.assert_array_equal(once, again)


@each_target
@pytest.mark.parametrize("reduction", ["none", "add", "max"])
@pytest.mark.parametrize(("axis", "shape"), [(0, (9, 5, 4)), (1, (3, 6, 4)), (-1, (3, 5, 8))])
def test_elements(target: Target, reduction: str, axis: int, shape: tuple[int, ...]) -> None:
    extents = (9, 5, 4) if axis == 0 else (3, 7, 4) if axis == 1 else (3, 5, 6)
    types = (TensorType(DType.FLOAT32, extents), TensorType(DType.INT64, shape), TensorType(DType.FLOAT32, shape))
    compiled = NodeKernel("ScatterElements", *types, target=target, axis=axis, reduction=reduction)
    compiled.check(floats(*extents), picks(*shape, below=extents[axis]), floats(*shape), threads=2)


@each_target
@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, 2**40, -(2**62)])
def test_an_index_out_of_range_is_refused(target: Target, index: int) -> None:
    rows = kernel("ScatterND", f"float32[{ROWS},3]", "int64[n,1]", "float32[n,3]", target=target, reduction="add")
    rows(floats(ROWS, 3), np.array([[3], [index]]), floats(2, 3))
    elements = kernel("ScatterElements", f"float32[{ROWS},3]", "int64[2,3]", "float32[2,3]", target=target)
    elements(floats(ROWS, 3), np.full((2, 3), index), floats(2, 3))
    assert rows.status == elements.status == Status.INDEX_OUT_OF_RANGE
