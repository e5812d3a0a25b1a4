"""Products over weights that are not zero: sizes, targets, threads, epilogues, strides; which products get them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lathe.core.codegen.target import avx512, x86_64_v3
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import candidates, select
from lathe.core.kernels.sparse.spec import COLUMNS, GROUP, SparseSpec, pack, table_places
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel, scalar_body
from tests.core.targets import parametrize_targets, runs_here

F32 = DType.FLOAT32
N = symbol("n")
TARGETS = {"avx2": x86_64_v3(), "avx512": avx512()}
pytestmark = pytest.mark.skipif(not runs_here(x86_64_v3()), reason="this machine lacks AVX2")


def floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def with_zeros(*shape: int, share: float = 0.9) -> Array:
    random = np.random.default_rng(sum(shape))
    weight = random.standard_normal(shape).astype(np.float32)
    weight.reshape(-1)[random.permutation(weight.size)[: int(share * weight.size) + 1]] = 0
    return weight


def product(rows: Any, weight: Array, *extras: Any, **attrs: Any) -> NodeKernel:
    attrs.setdefault("target", x86_64_v3())
    kernel = NodeKernel("FusedMatMul", TensorType(F32, (*rows, weight.shape[0])), weight, *extras, **attrs)
    assert isinstance(kernel.call.spec, SparseSpec)
    return kernel


@parametrize_targets(TARGETS)
@pytest.mark.parametrize(("depth", "columns"), [(64, 64), (75, 90), (300, 17)])
def test_sizes_that_fill_no_block(target: Target, depth: int, columns: int) -> None:
    kernel = product((N,), with_zeros(depth, columns), target=target)
    for n, threads in ((1, 1), (7, 3), (8, 1), (16, 1), (23, 2), (45, 1), (64, 1), (130, 3), (0, 1)):
        kernel.check(floats(n, depth), threads=threads)


@pytest.mark.parametrize("rows", [1, 8, 9, 24, 60])
def test_code_for_a_known_number_of_rows_has_one_variant_if_that_is_enough(rows: int) -> None:
    kernel = product((rows,), with_zeros(96, 80))
    assert (len(kernel.call.spec.variants) == 1) == (rows <= 24)  # type: ignore[attr-defined]
    kernel.check(floats(rows, 96), threads=2)


@pytest.mark.parametrize("share", [0.9, 0.99, 1.0])
def test_columns_without_any_weight(share: float) -> None:
    product((N,), with_zeros(64, 100, share=share)).check(floats(30, 64))


def test_patterns_of_zeros_need_nothing_special() -> None:
    blocks = with_zeros(16, 96).repeat(4, axis=0)
    two_of_eight = floats(64, 96) * np.isin(np.arange(64) % 8, (1, 6))[:, None]
    for weight in (blocks, two_of_eight):
        product((N, 40), weight).check(floats(2, 40, 64))


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("columns", [80, 90])
def test_epilogues_with_a_bias_and_a_residual_sum(columns: int, is_long: bool) -> None:
    def write(b: Builder, y: Any, bias: Any, residual: Any) -> Any:
        total = b("Add", b("Add", y, bias), residual)
        return b("Mul", total, b("Erf", b("Tanh", total))) if is_long else b("Relu", total)

    extras = (floats(columns), TensorType(F32, (N, columns)))
    kernel = product((N,), with_zeros(64, columns), *extras, epilogue=scalar_body(3, write))
    for n in (3, 31, 50):
        kernel.check(floats(n, 64), floats(n, columns), threads=2)


@parametrize_targets(TARGETS)
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_convolutions_of_single_pixels(target: Target, strides: tuple[int, int]) -> None:
    image = TensorType(F32, (N, 7, 9, 64))
    kernel = NodeKernel(
        "FusedConv", image, with_zeros(70, 64, 1, 1), floats(70), layout="NHWC", strides=strides, target=target
    )
    assert isinstance(kernel.call.spec, SparseSpec)
    for n, threads in ((1, 1), (3, 2)):
        kernel.check(floats(n, 7, 9, 64), threads=threads)


def test_permuted_operands() -> None:
    weight = with_zeros(80, 64)
    x = TensorType(F32, (N, 40, 64))
    kernel = NodeKernel("FusedMatMul", x, weight, perm_b=(1, 0), perm_y=(1, 0, 2), target=x86_64_v3())
    assert isinstance(kernel.call.spec, SparseSpec)
    kernel.check(floats(3, 40, 64), threads=2)


def test_products_with_zeros_are_left_out() -> None:
    """An infinite element counts only where its weight is not zero."""
    weight = with_zeros(64, 80)
    x = np.ones((20, 64), np.float32)
    x[3, 5] = np.inf
    (y,) = product((N,), weight)(x)
    assert np.isinf(y[3]).tolist() == (weight[5] != 0).tolist()
    assert not np.isnan(y).any() and np.isfinite(np.delete(y, 3, axis=0)).all()


def test_a_block_that_would_leave_the_cache_has_fewer_rows() -> None:
    small = replace(x86_64_v3(), l2_bytes=1 << 16)
    kernel = product((N,), with_zeros(1000, 64), target=small)
    assert kernel.call.spec.variants == ((1, 8),)  # type: ignore[attr-defined]
    kernel.check(floats(20, 1000), rtol=1e-3, atol=1e-4)


def test_the_table_holds_each_weight_once() -> None:
    weight = with_zeros(50, 40)
    table = pack(weight)
    starts, places, begin = table_places(40)
    first = table[starts:places]
    entries = table[begin:].reshape(-1, 2, GROUP)
    found = np.zeros((51, 48), np.float32)
    for group in range(len(first) - 1):
        for lane in range(GROUP):
            column = group * GROUP // COLUMNS * COLUMNS + table[places + group * GROUP + lane]
            steps = entries[first[group] : first[group + 1]]
            found[steps[:, 0, lane], column] += np.ascontiguousarray(steps[:, 1, lane]).view(np.float32)
    np.testing.assert_array_equal(found[:50, :40], weight)
    assert not found[50].any() and not found[:, 40:].any()


def _request(rows: Any, weight: Array, target: Target | None = None) -> Request:
    graph = Graph("test")
    b = Builder(graph)
    x = b.input("x", TensorType(F32, (*rows, weight.shape[0])))
    graph.outputs = [b("MatMul", x, b.constant(weight, "w"))]
    return Request(graph.nodes[0], graph.constants, target or x86_64_v3())


@pytest.mark.parametrize(
    ("rows", "share", "is_preferred", "is_offered"),
    [
        ((N,), 0.9, True, True),
        ((N,), 0.8, False, True),
        ((N,), 0.6, False, False),
        ((N, 49), 0.75, True, True),
        ((N, 49), 0.6, False, True),
        ((N, 49), 0.4, False, False),
    ],
)
def test_the_share_of_zeros_decides(rows: Any, share: float, is_preferred: bool, is_offered: bool) -> None:
    request = _request(rows, with_zeros(128, 128, share=share))
    call, offered = select(request), candidates(request)
    assert call is not None and isinstance(call.spec, SparseSpec) == is_preferred
    kinds = [isinstance(each.spec, SparseSpec) for each in offered]
    assert (True in kinds) == is_offered and False in kinds[:2]


def test_small_products_and_narrow_vectors_keep_all_weights() -> None:
    for request in (
        _request((N,), with_zeros(32, 32)),
        _request((N,), with_zeros(128, 128), replace(x86_64_v3(), vector_bytes=16)),
    ):
        call = select(request)
        assert call is not None and not isinstance(call.spec, SparseSpec)
