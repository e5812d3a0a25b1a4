"""Quantized graphs: which nodes get integer kernels, and that results stay within one quantum of ONNX's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.compiler import run_passes
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.pipeline import Options, optimize
from lathe.core.reference import interpret
from tests.core.passes.case_files import operators
from tests.core.small_models import model, theirs
from tests.random_numbers import RNG

F32 = DType.FLOAT32
N = symbol("n")
ROOT = Path(__file__).resolve().parents[3]


def network(write: Callable[[Builder, Value], Value], *shape: int, dtype: DType = F32) -> Graph:
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(dtype, (N, *shape)))
    b.graph.outputs = [write(b, x)]
    return b.graph


def scalar(b: Builder, value: Any, dtype: Any) -> Value:
    return b.constant(np.array(value, dtype))


def quantized(b: Builder, x: Value, scale: float, zero: int, dtype: Any = np.uint8) -> Value:
    return b("QuantizeLinear", x, scalar(b, scale, np.float32), scalar(b, zero, dtype))


def pair(b: Builder, x: Value, scale: float = 0.05, zero: int = 120, dtype: Any = np.uint8) -> Value:
    """Quantize and dequantize."""
    y = quantized(b, x, scale, zero, dtype)
    return b("DequantizeLinear", y, scalar(b, scale, np.float32), scalar(b, zero, dtype))


def weight(b: Builder, *shape: int, axis: int | None = None, dtype: Any = np.int8) -> Value:
    """A weight around zero, with a scale for each index of an axis or one for all."""
    middle = 0 if dtype is np.int8 else 128
    whole = RNG.integers(-100, 101, shape) + middle
    count = () if axis is None else (shape[axis],)
    scale = b.constant(RNG.uniform(0.01, 0.02, count).astype(np.float32))
    zero = b.constant(np.full(count, middle, dtype))
    return b("DequantizeLinear", b.constant(whole.astype(dtype)), scale, zero, axis=axis or 0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def compiled(graph: Graph, integers: bool, precision: str = "float32") -> lathe.Session:
    """A session, compiled as for a CPU with an instruction for products of bytes (`integers`) or without one.

    Kernels for bytes run on both, but the compiler chooses them only with the instruction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_passes, "has_int8_dot", lambda target: integers)
        return lathe.compile(graph, threads=1, precision=precision)


def check(graph: Graph, x: Array, quantum: float, kernels: str = "uint8") -> None:
    """Compile, run, and compare with the reference on the original graph: 98% of the results are equal.

    `kernels` must be among the kernels if the CPU multiplies bytes."""
    (want,) = interpret(graph, {"x": x}).values()
    for integers in (True, False):
        session = compiled(graph, integers)
        text = session.explain()
        assert " 0 on the reference" in text, text
        assert kernels in text or not integers
        (got,) = session.run({"x": x}).values()
        assert got.dtype == want.dtype and got.shape == want.shape
        apart = np.abs(got.astype(np.float64) - want.astype(np.float64))
        assert apart.max() <= quantum * 1.001 + 1e-5 * np.abs(want.astype(np.float64)).max(), f"{integers=}"
        assert (apart > quantum / 2).mean() < 0.02, f"{integers=}"


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("axis", [None, 1])
def test_products(dtype: Any, axis: int | None) -> None:
    def write(b: Builder, x: Value) -> Value:
        zero = 120 if dtype is np.uint8 else -7
        y = b("MatMul", pair(b, x, 0.05, zero, dtype), weight(b, 24, 20, axis=axis))
        return quantized(b, b("Relu", b("Add", y, b.constant(floats(20)))), 0.1, 3, dtype)

    check(network(write, 24), floats(9, 24) * 3, quantum=1)


@pytest.mark.parametrize("depth", [3, 16, 30])
def test_gemm_with_swapped_weights_and_any_depth(depth: int) -> None:
    def write(b: Builder, x: Value) -> Value:
        y = b("Gemm", pair(b, x), weight(b, 11, depth, axis=0), b.constant(floats(11)), transB=1, alpha=0.5, beta=2.0)
        return pair(b, y, 0.1)

    check(network(write, depth), floats(5, depth), quantum=0.1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize(
    ("channels", "kernel", "attrs"),
    [
        (3, (7, 7), {"strides": (2, 2), "pads": (3, 3, 3, 3)}),
        (8, (3, 3), {"pads": (1, 1, 1, 1)}),
        (8, (1, 1), {}),
        (16, (3, 2), {"group": 2, "auto_pad": "SAME_UPPER"}),
        (6, (3, 3), {"group": 6, "pads": (1, 1, 1, 1)}),
    ],
)
def test_convolutions(dtype: Any, channels: int, kernel: tuple[int, int], attrs: dict[str, Any]) -> None:
    def write(b: Builder, x: Value) -> Value:
        w = weight(b, 12, channels // attrs.get("group", 1), *kernel, axis=0)
        bias = b(
            "DequantizeLinear",
            b.constant(RNG.integers(-900, 900, 12, np.int32)),
            b.constant(np.full(12, 1e-3, np.float32)),
            axis=0,
        )
        return quantized(b, b("Conv", pair(b, x, dtype=dtype, zero=17), w, bias, **attrs), 0.1, 9, dtype)

    few = attrs.get("group") == channels  # one channel per group is too little for words
    made = "gemm uint8" if kernel == (1, 1) else "conv 3x3" if few else "conv uint8"
    check(network(write, channels, 13, 12), floats(2, channels, 13, 12), 1, made)


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("zero", [0, 17])
def test_depthwise_convolutions_read_and_write_bytes(dtype: Any, axis: int | None, zero: int) -> None:
    def write(b: Builder, x: Value) -> Value:
        x = pair(b, b("Conv", pair(b, x), weight(b, 20, 6, 1, 1, axis=0)), 0.1, zero, dtype)
        y = b("Conv", x, weight(b, 20, 1, 3, 3, axis=axis), group=20, strides=(2, 1), pads=(1, 1, 1, 1))
        return quantized(b, y, 0.1, 9, dtype)

    graph = network(write, 6, 9, 11)
    rewritten, _ = optimize(graph)
    made = [str(node.output.dtype) for node in rewritten.nodes if node.op == "FusedConv"]
    assert made == ["uint8", "uint8" if dtype is np.uint8 else "int8"]
    check(graph, floats(2, 6, 9, 11) * 3, 1, "depthwise uint8 3x3")


def test_unsigned_weights_around_the_middle_become_signed() -> None:
    graph = network(lambda b, x: b("MatMul", pair(b, x), weight(b, 8, 6, dtype=np.uint8)), 8)
    check(graph, floats(4, 8), quantum=1e-4)


def residual_block() -> Graph:
    def write(b: Builder, x: Value) -> Value:
        x = pair(b, x)
        inner = pair(b, b("Relu", b("Conv", x, weight(b, 8, 8, 3, 3, axis=0), pads=(1,) * 4)), 0.1, 0)
        outer = pair(b, b("Conv", inner, weight(b, 8, 8, 1, 1, axis=0)), 0.2, 128)
        joined = pair(b, b("Relu", b("Add", outer, x)), 0.2, 0)
        return pair(b, b("MaxPool", joined, kernel_shape=(2, 2), strides=(2, 2)), 0.2, 0)

    return network(write, 8, 10, 10)


def test_a_residual_block_stays_in_bytes() -> None:
    graph = residual_block()
    rewritten, _ = optimize(graph)
    made = [str(node.output.dtype) for node in rewritten.nodes if node.op in ("FusedConv", "MaxPool")]
    assert made == ["uint8", "uint8", "uint8"]
    check(graph, floats(2, 8, 10, 10), quantum=0.2)


@pytest.mark.parametrize(
    ("dtype", "zero", "needed"), [("uint8", 0, False), ("uint8", 3, True), ("uint16", 0, False), ("int8", 0, True)]
)
def test_a_relu_before_integers_that_end_at_zero_is_left_out(dtype: str, zero: int, needed: bool) -> None:
    data = model(
        f"float[n,6] x => {dtype}[n,6] y",
        "r = Relu(x) y = QuantizeLinear(r, s, z)",
        f"float s = {{0.1}}, {dtype} z = {{{zero}}}",
    )
    nodes = optimize(lathe.load(data))[0].nodes
    bodies = [node.attrs["body"] for node in nodes if node.op == "FusedElementwise"]
    assert any("Relu" in operators(each) for each in bodies) is needed
    x = np.array([[-1.0, -0.04, 0.0, 0.26, 99.0, np.nan]], np.float32)
    want = interpret(lathe.load(data), {"x": x})["y"]
    np.testing.assert_array_equal(lathe.compile(data, threads=1, tune="off").run({"x": x})["y"], want)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_pooling_before_a_quantization_reads_bytes(dtype: str) -> None:
    def write(b: Builder, x: Value) -> Value:
        y = b("Relu", b("Conv", pair(b, x), weight(b, 8, 8, 3, 3), pads=(1, 1, 1, 1)))
        pooled = b("MaxPool", y, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
        return b("Conv", pair(b, pooled, 0.1, 3, np.dtype(dtype).type), weight(b, 4, 8, 1, 1))

    graph = network(write, 8, 10, 10)
    (pool,) = (node for node in optimize(graph)[0].nodes if node.op in ("MaxPool", "PooledConv"))
    assert str(pool.output.dtype) == "uint8"
    check(graph, floats(2, 8, 10, 10), quantum=0.2)


def test_a_pooling_of_numbers_that_may_be_nan_stays_before_the_quantization() -> None:
    data = model(
        "float[n,1,1,4] x => uint8[n,1,1,2] y",
        "p = MaxPool<kernel_shape = [1,2], strides = [1,2]>(x) y = QuantizeLinear(p, s, z)",
        "float s = {0.1}, uint8 z = {3}",
    )
    x = np.array([np.nan, 1.0, 2.0, -5.0], np.float32).reshape(1, 1, 1, 4)
    want = interpret(lathe.load(data), {"x": x})["y"]
    np.testing.assert_array_equal(lathe.compile(data, threads=1, tune="off").run({"x": x})["y"], want)


def test_quantizing_operators_are_spelled_out() -> None:
    def write(b: Builder, x: Value) -> Value:
        q = quantized(b, x, 0.05, 100)
        w, scale = b.constant(RNG.integers(-9, 9, (4, 8, 3, 3), np.int8)), scalar(b, 0.1, np.float32)
        args = (q, scalar(b, 0.05, np.float32), scalar(b, 100, np.uint8), w, b.constant(np.full(4, 0.02, np.float32)))
        bias = b.constant(RNG.integers(-99, 99, 4, np.int32))
        y = b("QLinearConv", *args, b.constant(np.zeros(4, np.int8)), scale, scalar(b, 50, np.uint8), bias)
        v = b("Transpose", y, perm=(0, 2, 3, 1))
        m = b.constant(RNG.integers(-9, 9, (4, 6), np.int8))
        more = (m, scalar(b, 0.03, np.float32), scalar(b, 0, np.int8), scale, scalar(b, 7, np.uint8))
        return b("QLinearMatMul", v, scale, scalar(b, 50, np.uint8), *more)

    check(network(write, 8, 6, 6), floats(2, 8, 6, 6), quantum=1)


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("scales", ["0.05, 0.02, 0.5", "0.1, 0.1, 0.7", "0.0123, 0.0456, 0.9"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_quantizing_operators_round_like_onnx_runtime(dtype: str, scales: str, integers: bool) -> None:
    """Every result, with one scale or one per output channel, with a bias or without."""
    a, b, c = scales.split(", ")
    weights = ", ".join(map(str, RNG.integers(-50, 50, 32 * 24)))
    steps = ", ".join(str(float(b) / divisor) for divisor in (1, 2, 3) * 8)
    common = f"float a = {{{a}}}, float b = {{{b}}}, float c = {{{c}}}, int8 bz = {{0}}"
    points = f"{dtype} az = {{7}}, {dtype} cz = {{3}}"
    vectors = f"float[24] bs = {{{steps}}}, int8[24] bzs = {{{', '.join('0' * 24)}}}"
    biases = f"int32[24] bias = {{{', '.join(map(str, RNG.integers(-2000, 2000, 24)))}}}"
    product = "y = QLinearMatMul(x, a, az, w, b, bz, c, cz) z = QLinearMatMul(x, a, az, w, bs, bzs, c, cz)"
    rows = f"{dtype}[n,32] x => {dtype}[n,24] y, {dtype}[n,24] z"
    image = "y = QLinearConv(x, a, az, w, b, bz, c, cz) z = QLinearConv(x, a, az, w, bs, bzs, c, cz, bias)"
    images = f"{dtype}[n,32,9,9] x => {dtype}[n,24,9,9] y, {dtype}[n,24,9,9] z"
    for signature, body, shape in ((rows, product, "32,24"), (images, image, "24,32,1,1")):
        data = model(signature, body, f"{common}, {points}, {vectors}, {biases}, int8[{shape}] w = {{{weights}}}")
        x = RNG.integers(0, 100, (99, 32) if signature is rows else (2, 32, 9, 9)).astype(dtype)
        got, want = compiled(lathe.load(data), integers).run({"x": x}), theirs(data, {"x": x})
        for name in ("y", "z"):
            np.testing.assert_array_equal(got[name], want[name])
            np.testing.assert_array_equal(interpret(lathe.load(data), {"x": x})[name], want[name])


@pytest.mark.parametrize("dtype", [DType.UINT8, DType.INT8])
def test_integer_products_are_exact(dtype: DType) -> None:
    x = RNG.integers(0, 256, (7, 20)).astype(np.uint8).view(dtype.numpy)
    zero = np.array(99, dtype.numpy)
    w = RNG.integers(0, 100, (20, 9)).astype(np.uint8)

    def write(b: Builder, value: Value) -> Value:
        return b("MatMulInteger", value, b.constant(w), b.constant(zero), scalar(b, 60, np.uint8))

    check(network(write, 20, dtype=dtype), x, quantum=0)


def test_dynamic_quantization_takes_off_a_computed_zero_point() -> None:
    def write(b: Builder, x: Value) -> Value:
        low, high = b("ReduceMin", x, keepdims=0), b("ReduceMax", x, keepdims=0)
        scale = b("Div", b("Sub", high, low), scalar(b, 255, np.float32))
        zero = b("Cast", b("Round", b("Div", b("Neg", low), scale)), to=DType.UINT8.onnx_code)
        q = b("QuantizeLinear", x, scale, zero)
        total = b("MatMulInteger", q, b.constant(RNG.integers(-99, 99, (16, 12), np.int8)), zero)
        return b("Mul", b("Cast", total, to=F32.onnx_code), b("Mul", scale, scalar(b, 0.01, np.float32)))

    graph = network(write, 16)
    rewritten, _ = optimize(graph)
    assert operators(rewritten)["FusedMatMul"] == 1 and "MatMulInteger" not in operators(rewritten)
    check(graph, floats(5, 16), quantum=1e-4)


def test_without_byte_products_the_same_graph_runs_in_floats() -> None:
    def write(b: Builder, x: Value) -> Value:
        return pair(b, b("MatMul", pair(b, x), weight(b, 8, 6, axis=1)), 0.1)

    graph, x = network(write, 8), {"x": floats(4, 8)}
    rewritten, _ = optimize(graph, Options(integers=False))
    (product,) = (node for node in rewritten.nodes if node.op == "FusedMatMul")
    assert {str(value.dtype) for value in product.inputs[:2] if value} == {"float32"}
    for name, want in interpret(graph, x).items():
        assert np.abs(interpret(rewritten, x)[name] - want).max() <= 0.1001


def test_per_channel_conversions_of_activations_are_elementwise() -> None:
    def write(b: Builder, x: Value) -> Value:
        scale = b.constant(np.array([0.1, 0.2, 0.3], np.float32))
        zero = b.constant(np.array([1, 2, 3], np.uint8))
        return b("DequantizeLinear", b("QuantizeLinear", b("Exp", x), scale, zero, axis=1), scale, zero, axis=1)

    check(network(write, 3, 5), floats(4, 3, 5), quantum=0.3, kernels="elementwise")


# Run in a process of its own, because a process has one target: prints how many outputs are off by more than a quantum,
# then the largest error in bfloat16.
OTHER_TARGET = """
import numpy as np, lathe
from tests.core.passes import test_quantized as nets
graph = nets.residual_block()
x = {"x": nets.floats(2, 8, 10, 10)}
session, precise = lathe.compile(graph, threads=1), lathe.compile(graph, threads=1, precision="bfloat16")
(got,), (near,), (want,) = session.run(x).values(), precise.run(x).values(), lathe.interpret(graph, x).values()
print(int((np.abs(got - want) > 0.2001).sum()), float(np.abs(near - want).max() / np.abs(want).max()))
"""


@pytest.mark.sample(2, native=True)
@pytest.mark.parametrize("target", ["x86-64-v3", "plain"])
def test_other_targets(target: str) -> None:
    command = [sys.executable, "-c", OTHER_TARGET]
    environment = {**os.environ, "LATHE_TARGET": target}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    off, error = done.stdout.split()
    assert int(off) == 0 and float(error) < 0.05


def test_float_parts_may_be_bfloat16() -> None:
    graph, x = residual_block(), {"x": floats(2, 8, 10, 10)}
    (got,), (want,) = compiled(graph, True, "bfloat16").run(x).values(), interpret(graph, x).values()
    assert np.abs(got - want).max() <= 0.2001
