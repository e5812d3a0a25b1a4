"""Strassen's products against NumPy: rows that fill no tile, epilogues, strides; samples that stay apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lathe.core.codegen.target import avx512, plain, x86_64_v3
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import candidates, select
from lathe.core.kernels.shared.panels import Tile
from lathe.core.kernels.strassen.spec import PRODUCTS, StrassenSpec, pack
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel, scalar_body
from tests.core.kernels.test_conv import convolution
from tests.core.kernels.test_gemm import F32, N, floats, tensor
from tests.core.targets import parametrize_targets, runs_here

WIDE = replace(x86_64_v3(), l1_bytes=1 << 20)  # a tile goes through all panels at once
NARROW = replace(x86_64_v3(), l1_bytes=1 << 15, l2_bytes=1 << 16)  # panels do not fit: product by product
DEPTH = 384  # the smallest size that prefers seven products
TARGETS = {
    "in turn": NARROW,
    "at once": WIDE,
    "avx512, in turn": replace(avx512(), l1_bytes=1 << 15, l2_bytes=1 << 16),
    "avx512, at once": replace(avx512(), l1_bytes=1 << 20),
}
pytestmark = pytest.mark.skipif(not runs_here(WIDE), reason="this machine lacks AVX2")


def product(rows: int, depth: int = DEPTH, columns: int = 384, *extras: Any, **attrs: Any) -> NodeKernel:
    attrs.setdefault("target", WIDE)
    return NodeKernel("FusedMatMul", tensor(N, rows, depth), floats(depth, columns), *extras, **attrs)


def spec_of(kernel: NodeKernel) -> StrassenSpec:
    assert isinstance(kernel.call.spec, StrassenSpec)
    return kernel.call.spec


@pytest.mark.sample(3, native=True)
@parametrize_targets(TARGETS)
@pytest.mark.parametrize("rows", [64, 83, 128])
def test_rows_that_fill_tiles_or_not(target: Target, rows: int) -> None:
    kernel = product(rows, target=target)
    assert spec_of(kernel).in_turn == (target.l1_bytes == NARROW.l1_bytes)
    for n, threads in ((1, 1), (5, 1), (1, 3), (2, 2), (0, 2)):
        kernel.check(floats(n, rows, DEPTH), threads=threads, rtol=1e-3, atol=1e-3)


def test_rows_of_one_sample_without_a_batch() -> None:
    kernel = NodeKernel("MatMul", tensor(70, DEPTH), floats(DEPTH, 384), target=WIDE)
    assert spec_of(kernel).samples == 1
    kernel.check(floats(70, DEPTH), threads=2, rtol=1e-3, atol=1e-3)


@parametrize_targets({name: TARGETS[name] for name in ("at once", "in turn")})
@pytest.mark.parametrize("op", ["Relu", "Gelu"])
def test_epilogues_at_once_and_deferred(target: Target, op: str) -> None:
    def write(b: Builder, x: Value, bias: Value, residual: Value) -> Value:
        return b("Add", b(op, b("Add", x, bias)), residual)

    kernel = product(72, DEPTH, 384, tensor(384), tensor(N, 72, 384), epilogue=scalar_body(3, write), target=target)
    assert spec_of(kernel).finish.deferred == (op == "Gelu")
    assert kernel.call.inplace == (() if op == "Gelu" else (3,))
    kernel.check(floats(3, 72, DEPTH), floats(384), floats(3, 72, 384), threads=2, rtol=1e-3, atol=1e-3)


def test_transposed_weights_and_a_residual_that_repeats() -> None:
    def write(b: Builder, x: Value, extra: Value) -> Value:
        return b("Add", x, extra)

    a, extra = tensor(N, 70, DEPTH), tensor(70, 384)
    kernel = NodeKernel(
        "FusedMatMul", a, floats(384, DEPTH), extra, perm_b=(1, 0), epilogue=scalar_body(2, write), target=WIDE
    )
    assert spec_of(kernel).finish.pixels.rank == 2
    kernel.check(floats(2, 70, DEPTH), floats(70, 384), rtol=1e-3, atol=1e-3)


def test_transposed_operands_and_output() -> None:
    perms = {"perm_a": (1, 0, 2), "perm_y": (1, 0, 2)}
    kernel = NodeKernel("FusedMatMul", tensor(70, N, DEPTH), floats(DEPTH, 384), target=WIDE, **perms)
    assert spec_of(kernel).source.rank == 2
    kernel.check(floats(70, 3, DEPTH), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stride", [1, 2])
def test_pointwise_convolutions(stride: int) -> None:
    add = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))
    size = (9 * stride, 8 * stride)
    residual = TensorType(F32, (N, 9, 8, 384))
    attrs = {"strides": (stride,) * 2, "epilogue": add}
    kernel = convolution(size, DEPTH, 384, (1, 1), residual, target=WIDE, **attrs)
    assert (spec_of(kernel).rows, kernel.call.inplace) == (72, (3,))
    kernel.check(floats(2, *size, DEPTH), floats(2, 9, 8, 384), threads=2, rtol=1e-3, atol=1e-3)


def test_error_is_small_against_the_largest_result() -> None:
    kernel = product(128, 1024, 384)
    x, weight = floats(1, 128, 1024), next(iter(kernel.graph.constants.values()))
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    assert np.abs(kernel(x)[0] - exact).max() < 1e-5 * np.abs(exact).max()


def test_samples_do_not_influence_each_other() -> None:
    kernel, x = product(64), floats(3, 64, DEPTH)
    [alone] = kernel(x[1:2])
    x[0], x[2] = np.nan, np.inf
    np.testing.assert_array_equal(kernel(x)[0][1], alone[0])


@pytest.mark.parametrize(
    "shape", [(64, N, DEPTH), (64 * N, DEPTH), (N, 16, DEPTH)], ids=["batch second", "flattened", "few rows"]
)
def test_rows_of_unknown_samples_or_too_few_use_plain_products(shape: tuple[Any, ...]) -> None:
    kernel = NodeKernel("FusedMatMul", tensor(*shape), floats(DEPTH, 384), target=WIDE)
    assert kernel.call.spec.family == "gemm"


def test_narrow_targets_and_small_products_use_plain_products() -> None:
    assert product(64, target=plain()).call.spec.family == "gemm"
    assert product(64, depth=96).call.spec.family == "gemm"
    assert product(64, columns=128).call.spec.family == "gemm"


def test_the_plain_product_is_a_candidate_of_the_tuner() -> None:
    kernel = product(64)
    request = Request(kernel.node, kernel.graph.constants, WIDE)
    first, second, *_ = candidates(request)
    exact = replace(request, winograd=False)
    assert (first.spec.family, second.spec) == ("strassen", select(exact).spec)  # type: ignore[union-attr]
    assert {call.spec.family for call in candidates(exact)} == {"gemm"}


def test_for_shallow_products_strassen_is_not_preferred() -> None:
    kernel = product(64, depth=DEPTH - 32)
    first, *others = candidates(Request(kernel.node, kernel.graph.constants, WIDE))
    assert first.spec.family == "gemm"
    assert "strassen" in {call.spec.family for call in others}


def test_right_factors() -> None:
    matrix, tile = floats(8, 8), Tile(1, 1, 2)
    factors = pack(matrix, tile).reshape(2, PRODUCTS, 4, 2)
    b11, b12, b21, b22 = matrix[:4, 4:6], matrix[:4, 6:], matrix[4:, 4:6], matrix[4:, 6:]
    expected = [b11, b21, b22 - b12 + b11, b22 - b12, b21 - b22 + b12 - b11, b12 - b11, b22]
    np.testing.assert_allclose(factors[1], expected, atol=1e-6)
    assert factors.dtype == DType.FLOAT32.numpy
