"""Products of bfloat16 pairs, of float16 and of bytes, with and without dot-product instructions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lathe.core.codegen.target import avx512, has_bfloat16_dot, has_int8_dot, host, plain, x86_64_v3
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.shared.words import count_in_words, pack_words
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel, scalar_body, single_node
from tests.core.targets import each_wide, parametrize_targets, vectors

F32, BF16, F16, U8 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.UINT8
N = symbol("n")
TARGETS = {
    "host": host(),
    "host without tiles": vectors(),
    "avx512": avx512(),
    "x86-64-v3": x86_64_v3(),
    "plain": plain(),
}
each_narrow = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
each_target = parametrize_targets(TARGETS)


def floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def halves(*shape: int, dtype: DType = BF16) -> Array:
    return floats(*shape).astype(dtype.numpy)


def unsigned(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def signed(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(-128, 128, shape, np.int8)


def narrowing(inputs: int, write: Any, dtype: DType) -> Graph:
    """An epilogue that ends in a conversion to a narrow type."""
    return scalar_body(inputs, lambda b, *x: b("Cast", write(b, *x), to=dtype.onnx_code))


def test_targets_differ_in_their_instructions() -> None:
    assert not has_bfloat16_dot(x86_64_v3()) and not has_int8_dot(avx512())


def test_words_hold_neighbours_along_the_depth() -> None:
    words = pack_words(np.arange(-3, 9, dtype=np.int8).reshape(6, 2), U8)
    assert words.shape == (2, 2) and words.view(np.int8).reshape(2, 2, 4)[0, 1].tolist() == [-2, 0, 2, 4]
    assert words.view(np.int8).reshape(2, 2, 4)[1, 0].tolist() == [5, 7, 0, 0]


def test_sizes_in_words_are_integers_for_every_batch() -> None:
    assert (count_in_words(6, BF16), count_in_words(6, U8), count_in_words(N * 8 + 4, U8)) == (3, None, N * 2 + 1)
    assert count_in_words(N * 8 + 2, U8) is None


@pytest.mark.sample(4)
@each_target
@each_narrow
@pytest.mark.parametrize(("depth", "columns"), [(2, 1), (6, 17), (64, 48), (130, 100)])
def test_products_of_narrow_floats(target: Target, dtype: DType, depth: int, columns: int) -> None:
    kernel = NodeKernel("FusedMatMul", TensorType(dtype, (N, depth)), floats(depth, columns), target=target)
    for rows, threads in ((1, 1), (7, 2), (33, 3)):
        kernel.check(halves(rows, depth, dtype=dtype), threads=threads, rtol=1e-5, atol=1e-5 * depth)


@each_target
@each_narrow
def test_long_epilogues_that_narrow_run_once_per_tile(target: Target, dtype: DType) -> None:
    body = narrowing(2, lambda b, x, bias: b("Mul", b("Sigmoid", b("Add", x, bias)), b("Tanh", x)), dtype)
    args = (TensorType(dtype, (N, 24)), floats(24, 37), floats(37))
    kernel = NodeKernel("FusedMatMul", *args, target=target, epilogue=body)
    kernel.check(halves(19, 24, dtype=dtype), threads=2, rtol=1e-2, atol=1e-5)  # a step of bfloat16 is 2^-8


@each_narrow
def test_a_narrow_residual_is_read_in_float32_and_replaced(dtype: DType) -> None:
    args = (TensorType(dtype, (N, 16)), floats(16, 33), TensorType(dtype, (N, 33)))
    kernel = NodeKernel("FusedMatMul", *args, epilogue=_residual_body(dtype))
    assert kernel.call.inplace == (2,)
    kernel.check(halves(9, 16, dtype=dtype), halves(9, 33, dtype=dtype), rtol=1e-2, atol=1e-5)


def _residual_body(dtype: DType) -> Graph:
    graph = Graph("body")
    b = Builder(graph)
    x, rest = b.input("x", TensorType(F32, ())), b.input("rest", TensorType(dtype, ()))
    graph.outputs = [b("Cast", b("Add", x, b("Cast", rest, to=F32.onnx_code)), to=dtype.onnx_code)]
    return graph


def test_odd_depths_have_no_pairs() -> None:
    graph = single_node("FusedMatMul", TensorType(BF16, (N, 7)), floats(7, 3))
    assert select(Request(graph.nodes[0], graph.constants, host())) is None


@pytest.mark.sample(3)
@each_target
@each_narrow
@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "attrs"),
    [
        (6, 20, (3, 3), {"pads": (1, 1, 1, 1)}),
        (16, 40, (3, 3), {"pads": (0, 1, 1, 0), "strides": (2, 2)}),
        (8, 12, (1, 1), {}),
        (8, 6, (3, 2), {"group": 2, "dilations": (2, 1)}),
        (8, 8, (3, 3), {"group": 4, "pads": (1, 1, 1, 1)}),
    ],
)
def test_convolutions_of_narrow_floats(
    target: Target, dtype: DType, channels: int, outputs: int, kernel: tuple[int, int], attrs: dict[str, Any]
) -> None:
    weight = floats(outputs, channels // attrs.get("group", 1), *kernel)
    image = TensorType(dtype, (N, 7, 9, channels))
    node = NodeKernel("FusedConv", image, weight, floats(outputs), layout="NHWC", target=target, **attrs)
    for n, threads in ((1, 1), (3, 2)):
        node.check(halves(n, 7, 9, channels, dtype=dtype), threads=threads, atol=1e-4)


@each_wide
@pytest.mark.parametrize("stride", [1, 2])
def test_winograd_of_float16_computes_in_float32(target: Target, stride: int) -> None:
    image, weight = TensorType(F16, (N, 14, 13, 32)), halves(48, 32, 3, 3, dtype=F16).astype(np.float32)
    attrs: dict[str, Any] = {"pads": (1,) * 4, "strides": (stride,) * 2, "layout": "NHWC", "target": target}
    kernel = NodeKernel("FusedConv", image, weight, **attrs)
    assert kernel.call.spec.family == "winograd"
    kernel.check(halves(2, 14, 13, 32, dtype=F16), threads=2, rtol=1e-4, atol=1e-3)


@each_wide
def test_winograd_of_bfloat16_loses_little(target: Target) -> None:
    image = TensorType(BF16, (N, 14, 13, 32))
    kernel = NodeKernel("FusedConv", image, floats(48, 32, 3, 3), pads=(1,) * 4, layout="NHWC", target=target)
    assert kernel.call.spec.family == "winograd"
    x = halves(2, 14, 13, 32)
    [y] = kernel(x, threads=2)
    exact = NodeKernel("FusedConv", TensorType(F32, image.shape), *kernel.graph.constants.values(), pads=(1,) * 4,
                       layout="NHWC", target=target)(x.astype(np.float32))[0]  # fmt: skip
    assert np.abs(y - exact).max() < 0.005 * np.abs(exact).max()
    assert np.sqrt(np.mean((y - exact) ** 2)) < 0.004 * np.sqrt(np.mean(exact**2))


@each_narrow
def test_depthwise_convolutions_read_narrow_floats(dtype: DType) -> None:
    image = TensorType(dtype, (N, 9, 7, 20))
    weight = halves(20, 1, 3, 3, dtype=dtype).astype(np.float32)
    node = NodeKernel("FusedConv", image, weight, group=20, pads=(1,) * 4, layout="NHWC")
    assert node.node.output.dtype is F32
    node.check(halves(2, 9, 7, 20, dtype=dtype), atol=1e-4)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize(("depth", "columns"), [(4, 3), (12, 17), (64, 48), (132, 100)])
def test_products_of_bytes_are_exact(target: Target, depth: int, columns: int) -> None:
    kernel = NodeKernel("FusedMatMul", TensorType(U8, (N, depth)), signed(depth, columns), target=target)
    for rows in (1, 9):
        kernel.check(unsigned(rows, depth), rtol=0, atol=0)


@each_target
def test_products_of_bytes_do_not_saturate(target: Target) -> None:
    weight = np.concatenate([np.full((64, 16), 127, np.int8), np.full((64, 16), -128, np.int8)], 1)
    [y] = NodeKernel("FusedMatMul", TensorType(U8, (N, 64)), weight, target=target)(np.full((5, 64), 255, np.uint8))
    assert (y == np.repeat([64 * 255 * 127, 64 * 255 * -128], 16)).all()


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("attrs", [{"pads": (1, 1, 1, 1)}, {"strides": (2, 2), "pads": (0, 1, 0, 1)}, {"group": 2}])
def test_convolutions_of_bytes_are_exact_around_their_zero(target: Target, attrs: dict[str, Any]) -> None:
    weight = signed(20, 16 // attrs.get("group", 1), 3, 3)
    image = TensorType(U8, (N, 13, 14, 16))
    kernel = NodeKernel("FusedConv", image, weight, layout="NHWC", pad_value=77, target=target, **attrs)
    kernel.check(unsigned(2, 13, 14, 16), threads=2, rtol=0, atol=0)


@each_wide
@each_narrow
def test_other_kernels_keep_narrow_floats(target: Target, dtype: DType) -> None:
    image = TensorType(dtype, (N, 9, 8, 20))
    x = halves(2, 9, 8, 20, dtype=dtype)
    for kernel in (
        NodeKernel("MaxPool", image, kernel_shape=(3, 3), pads=(1,) * 4, layout="NHWC", target=target),
        NodeKernel("AveragePool", image, kernel_shape=(2, 3), strides=(2, 2), layout="NHWC", target=target),
        NodeKernel("ReduceMean", image, axes=(1, 2), keepdims=0, target=target),
        NodeKernel("LayerNormalization", image, floats(20), floats(20), target=target),
    ):
        assert kernel.node.output.dtype is dtype
        kernel.check(x, rtol=1e-2, atol=1e-2)


@pytest.mark.sample(3)
@each_wide
@each_narrow
@pytest.mark.parametrize("depth", [16, 7])
@pytest.mark.parametrize("queries", [1, 4, 21])
def test_attention_of_narrow_floats(target: Target, dtype: DType, depth: int, queries: int) -> None:
    lengths = (queries, 21, 21)
    kernel = NodeKernel(
        "FusedAttention", *(TensorType(dtype, (N, 3, n, depth)) for n in lengths), perm_k=(0, 1, 3, 2), target=target
    )
    kernel.check(*(halves(2, 3, n, depth, dtype=dtype) for n in lengths), rtol=2e-2, atol=2e-2)


@each_target
def test_conversions_round_half_to_even(target: Target) -> None:
    halfway = np.arange(0x3F800000, 0x3F900000, 0x1000, np.uint32).view(np.float32)
    x = np.concatenate([halfway, -halfway, floats(1000) * 1e30, [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38]])
    x = x.astype(np.float32)
    down = NodeKernel("Cast", TensorType(F32, (N,)), to=BF16.onnx_code, target=target)
    [narrow] = down(x, threads=2)
    np.testing.assert_array_equal(narrow.astype(np.float32), x.astype(ml_dtypes.bfloat16).astype(np.float32))
    NodeKernel("Cast", TensorType(BF16, (N,)), to=F32.onnx_code, target=target).check(narrow, rtol=0, atol=0)
    NodeKernel("Cast", TensorType(BF16, (N,)), to=DType.INT32.onnx_code, target=target).check(halves(37), rtol=0)


@each_target
def test_conversions_of_float16(target: Target) -> None:
    """Every float16, the midpoints and their neighbours: round half to even, infinite from 65520 on."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    NodeKernel("Cast", TensorType(F16, (N,)), to=F32.onnx_code, target=target).check(every, threads=2, rtol=0, atol=0)
    finite = np.sort(every[np.isfinite(every)].astype(np.float64))
    between = (finite[1:] + finite[:-1]) / 2
    near = np.concatenate([np.nextafter(np.float32(between), np.float32(side)) for side in (-np.inf, np.inf)])
    edges = [65519.9, 65520.0, -65520.0, 2.0**-25, 2.0**-26, 1e-44, 3e38, np.inf, -np.inf, np.nan, -0.0]
    x = np.concatenate([np.float32(between), near, np.float32(edges)])
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float16)
    down = NodeKernel("Cast", TensorType(F32, (N,)), to=F16.onnx_code, target=target)
    [found] = down(x, threads=2)
    np.testing.assert_array_equal(found, narrow)
    narrow = floats(1000).astype(np.float16)
    NodeKernel("Cast", TensorType(F32, (N,)), to=DType.FLOAT16.onnx_code, target=target).check(x, rtol=0, atol=0)
    for dtype in (F32, BF16, DType.INT8, DType.BOOL):
        kernel = NodeKernel("Cast", TensorType(DType.FLOAT16, (N,)), to=dtype.onnx_code, target=target)
        kernel.check(narrow[:1000], threads=2, rtol=0, atol=0)


@pytest.mark.sample(3)
@each_target
@pytest.mark.parametrize("perm", [None, (1, 0)])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(40, 64, 70), (7, 38, 5), (33, 70, 100)])
@each_narrow
def test_right_operands_that_are_computed_become_words(
    target: Target, perm: Any, rows: int, depth: int, columns: int, dtype: DType
) -> None:
    shape = (depth, columns) if perm is None else (columns, depth)
    types = (TensorType(dtype, (rows, depth)), TensorType(F32, shape))
    compiled = NodeKernel("FusedMatMul", *types, target=target, perm_b=perm)
    compiled.check(halves(rows, depth, dtype=dtype), floats(*shape), threads=2, rtol=1e-4, atol=1e-4)


@each_target
@each_narrow
def test_words_of_columns_far_apart_are_gathered(target: Target, dtype: DType) -> None:
    """A batch of matrices with permuted axes: neither depth nor columns are contiguous."""
    types = (TensorType(dtype, (3, 9, 12)), TensorType(F32, (12, 5, 3)))
    compiled = NodeKernel("FusedMatMul", *types, target=target, perm_b=(2, 0, 1))
    compiled.check(halves(3, 9, 12, dtype=dtype), floats(12, 5, 3), threads=2, rtol=1e-3, atol=1e-3)


def test_a_right_operand_beyond_float16_is_infinite() -> None:
    """An operand packed by the kernel overflows as it would in memory; loss scaling relies on that."""
    kernel = NodeKernel("FusedMatMul", TensorType(F16, (40, 4)), TensorType(F32, (4, 20)))
    b = floats(4, 20)
    b[2, 3] = 7e4
    [y] = kernel(np.ones((40, 4), np.float16), b)
    assert np.isinf(y[:, 3]).all() and np.isfinite(np.delete(y, 3, 1)).all()
