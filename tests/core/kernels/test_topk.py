"""TopK: every type that has a kernel, equal elements, NaN and both zeros, along any axis."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import kernel, normal, sweep, tensor
from tests.core.targets import each_target, vectors


def repeated(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Few different numbers, so that indices decide."""
    return np.asarray(np.rint(np.asarray(normal(dtype, shape), np.float64) * 2), dtype.numpy)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int16", "uint16", "int8", "uint8"])
def test_types(target: Target, dtype: str) -> None:
    for largest in (0, 1):
        sweep("TopK", f"{dtype}[n,37]", target=target, outputs=2, sample=repeated, tolerance=0, K=(5,), largest=largest)


@each_target
@pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 2), (15, 3), (16, 16), (17, 1), (33, 33), (336, 100)])
def test_lengths(target: Target, length: int, count: int) -> None:
    for sample in (normal, repeated):
        sweep("TopK", f"float32[n,{length}]", target=target, outputs=2, sample=sample, tolerance=0, K=(count,))


@each_target
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes(target: Target, axis: int) -> None:
    sweep("TopK", "float32[6,9,n]", target=target, outputs=2, batches=(7, 8, 20), tolerance=0, K=(6,), axis=axis)


@pytest.mark.parametrize("largest", [0, 1])
def test_special_numbers(largest: int) -> None:
    special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38]
    rng = np.random.default_rng(0)
    x = np.array([rng.permutation(special * 4) for _ in range(200)], np.float32)
    for count in (1, 7, x.shape[1]):
        kernel("TopK", f"float32[n,{x.shape[1]}]", outputs=2, K=(count,), largest=largest).check(x, rtol=0, atol=0)


def test_extremes_of_integers() -> None:
    x = np.array([[-(2**31), 2**31 - 1, -(2**31), 0, 2**31 - 1, -1]] * 2, np.int32)
    for largest, count in itertools.product((0, 1), (1, 4, 6)):
        kernel("TopK", "int32[n,6]", outputs=2, K=(count,), largest=largest).check(x)


def test_values_alone() -> None:
    sweep("TopK", "float32[n,40]", target=vectors(), outputs=1, tolerance=0, K=(7,))


def test_unsupported_types_run_on_the_reference() -> None:
    for dtype in ("float64", "int64", "uint32"):
        graph = single_node("TopK", tensor(f"{dtype}[n,9]"), outputs=2, K=(3,))
        assert select(Request(graph.nodes[0], graph.constants, vectors())) is None
