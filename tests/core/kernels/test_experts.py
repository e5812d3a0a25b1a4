"""ExpertProduct: sorted rows, packed and computed weights, and experts that must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Packed, Status
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel, normal, sweep
from tests.core.targets import each_target

EXPERTS = 6


def _sample(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Experts of either sign, unevenly: half of the rows go to the same one."""
    if dtype in (DType.INT32, DType.INT64):
        rng = np.random.default_rng(len(shape))
        own = rng.integers(-EXPERTS, EXPERTS, shape)
        return np.where(rng.random(shape) < 0.5, 2, own).astype(dtype.numpy)
    return normal(dtype, shape)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("columns", [1, 16, 100])
def test_rows_of_packed_and_of_computed_weights(target: Target, columns: int) -> None:
    for weights in (floats(EXPERTS, columns, 37), f"float32[{EXPERTS},{columns},37]"):
        sweep(
            "ExpertProduct", "float32[n,37]", "int64[n]", weights, target=target, sample=_sample, batches=(0, 1, 3, 50)
        )


@each_target
def test_a_row_goes_to_several_experts(target: Target) -> None:
    weights = floats(EXPERTS, 40, 24)
    sweep("ExpertProduct", "float32[n,3,1,24]", "int32[n,3,4]", weights, target=target, sample=_sample, tolerance=1e-4)
    sweep("ExpertProduct", "float32[24]", "int64[n]", weights, target=target, sample=_sample, tolerance=1e-4)


@each_target
@pytest.mark.parametrize("expert", [EXPERTS, -EXPERTS - 1, 2**40])
def test_an_expert_out_of_range_is_refused(target: Target, expert: int) -> None:
    weights = floats(EXPERTS, 9, 5)
    compiled = kernel("ExpertProduct", "float32[n,5]", "int64[n]", weights, target=target)
    x = floats(3, 5)
    [y] = compiled(x, np.array([3, expert, -1]))
    assert compiled.status == Status.INDEX_OUT_OF_RANGE
    np.testing.assert_allclose(y[[0, 2]], [weights[3] @ x[0], weights[-1] @ x[2]], 1e-4, 1e-5)


def test_weights_of_experts_without_rows_are_not_read() -> None:
    """NaN in the weights of an expert without rows reaches no result, since only chosen weights are multiplied."""
    weights = np.full((EXPERTS, 33, 8), np.nan, np.float32)
    weights[4] = floats(33, 8)
    compiled = kernel("ExpertProduct", "float32[n,8]", "int64[n]", weights)
    assert any(isinstance(operand, Packed) for operand in compiled.call.operands)
    x = floats(5, 8)
    [y] = compiled(x, np.full(5, 4))
    np.testing.assert_allclose(y, x @ weights[4].T, 1e-4, 1e-5)
