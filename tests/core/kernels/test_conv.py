"""Convolutions against NumPy: every window, tails, groups, epilogues; any n with one compiled kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Array, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel, scalar_body, single_node
from tests.core.small_models import assert_like_onnx_runtime, model, normal
from tests.core.targets import each_target, vectors

F32 = DType.FLOAT32
N = symbol("n")


def floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def image(*dims: Any) -> TensorType:
    return TensorType(F32, (N, *dims))


def convolution(
    size: tuple[int, ...],
    channels: int,
    outputs: int,
    kernel: tuple[int, ...],
    *extras: Any,
    bias: bool = True,
    group: int = 1,
    target: Target | None = None,
    **attrs: Any,
) -> NodeKernel:
    weight = floats(outputs, channels // group, *kernel)
    return NodeKernel(
        "FusedConv", image(*size, channels), weight, floats(outputs) if bias else None, *extras,
        layout="NHWC", group=group, target=target, **attrs,
    )  # fmt: skip


def check(kernel: NodeKernel, *batches: int, threads: int = 1) -> None:
    shape = kernel.graph.inputs[0].shape[1:]
    for n in batches:
        kernel.check(floats(n, *shape), threads=threads, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("channels", [1, 3, 6, 16, 20])
@pytest.mark.parametrize("outputs", [1, 7, 33])
def test_channel_tails(channels: int, outputs: int) -> None:
    check(convolution((7, 9), channels, outputs, (3, 3), pads=(1, 1, 1, 1)), 1, 3, threads=2)


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("channels", [3, 16], ids=["gathered", "implicit"])
@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [
        ((5, 5), {}),
        ((1, 3), {"pads": (0, 1, 0, 1)}),
        ((3, 2), {"strides": (2, 3), "pads": (0, 1, 2, 0)}),
        ((3, 3), {"dilations": (2, 2), "pads": (2, 2, 2, 2)}),
        ((3, 3), {"dilations": (3, 1), "pads": (1, 0, 1, 0)}),
        ((7, 7), {"strides": (2, 2), "pads": (3, 3, 3, 3)}),
        ((2, 2), {"strides": (4, 4), "pads": (1, 1, 1, 1)}),
    ],
)
def test_windows(channels: int, kernel: tuple[int, ...], attrs: dict[str, Any]) -> None:
    check(convolution((9, 8), channels, 10, kernel, **attrs), 2)


@each_target
@pytest.mark.parametrize("channels", [2, 17])
def test_targets_and_threads(target: Target, channels: int) -> None:
    kernel = convolution((6, 7), channels, 19, (3, 3), pads=(1, 1, 1, 1), target=target)
    check(kernel, 1, 3, threads=3)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("channels", [2, 4, 8])
def test_groups_narrower_than_a_vector(channels: int, target: Target) -> None:
    strides = {"pads": (1, 1, 1, 1), "strides": (2, 1)}
    check(convolution((5, 6), 32, 32, (3, 3), group=32 // channels, target=target, **strides), 1, 3, threads=2)


def test_groups_that_fill_one_vector() -> None:
    check(convolution((4, 3), 16, 16, (2, 2), group=2), 2)


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("outputs", [8, 36])
def test_groups(group: int, outputs: int) -> None:
    check(convolution((5, 6), 8, outputs, (3, 3), pads=(1, 1, 1, 1), group=group), 1, 2, threads=2)


def test_one_by_one_is_a_matrix_product() -> None:
    kernel = convolution((5, 7), 20, 33, (1, 1))
    assert kernel.call.spec.family == "gemm"
    check(kernel, 1, 3)
    strided = convolution((5, 7), 20, 33, (1, 1), strides=(2, 2))
    assert strided.call.spec.family == "conv"
    check(strided, 1, 3)


@pytest.mark.parametrize("size", [(11,), (3, 4, 5)])
@pytest.mark.parametrize("channels", [3, 18])
def test_other_ranks(size: tuple[int, ...], channels: int) -> None:
    rank = len(size)
    check(convolution(size, channels, 9, (3,) * rank, pads=(1,) * (2 * rank), strides=(2,) * rank), 2)


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize("shape", [(N, 5, 6, 9), (N, 1, 1, 9), (9,), (1,), (5, 6, 9), (N, 5, 6, 1), (6, 1)])
def test_extra_inputs_of_every_broadcast_pattern(kernel: tuple[int, int], shape: tuple[Any, ...]) -> None:
    def write(b: Builder, value: Value, extra: Value) -> Value:
        return b("Relu", b("Add", value, extra))

    pads = (kernel[0] // 2,) * 4
    extra = TensorType(F32, shape)
    node = convolution((5, 6), 4, 9, kernel, extra, pads=pads, epilogue=scalar_body(2, write))
    for n in (1, 3):
        node.check(floats(n, 5, 6, 4), floats(*(n if d is N else d for d in shape)), threads=n, atol=1e-4)


def test_only_a_residual_of_full_shape_may_be_replaced_in_place() -> None:
    add = scalar_body(3, lambda b, x, y, z: b("Add", b("Add", x, y), z))
    node = convolution((5, 6), 4, 9, (3, 3), image(5, 6, 9), image(1, 1, 9), pads=(1, 1, 1, 1), epilogue=add)
    assert node.call.inplace == (3,)


def test_without_bias_or_epilogue() -> None:
    check(convolution((6, 6), 16, 16, (3, 3), bias=False), 2)
    check(convolution((6, 6), 16, 16, (1, 1), bias=False), 2)


def test_plain_convolutions_are_covered_too() -> None:
    kernel = NodeKernel("Conv", image(6, 6, 5), floats(4, 5, 3, 3), floats(4), layout="NHWC", auto_pad="SAME_UPPER")
    check(kernel, 2)


def test_unsupported_convolutions_are_declined() -> None:
    first = single_node("Conv", TensorType(F32, (N, 5, 6, 6)), floats(4, 5, 3, 3))
    computed = single_node("Conv", image(6, 6, 5), TensorType(F32, (4, 5, 3, 3)), layout="NHWC")
    free = single_node("Conv", image(symbol("h"), 6, 5), floats(4, 5, 3, 3), layout="NHWC")
    for graph in (first, computed, free):
        assert select(Request(graph.nodes[0], graph.constants, vectors())) is None


def test_long_epilogues_run_over_finished_rows_and_never_in_place() -> None:
    def write(b: Builder, value: Value, residual: Value) -> Value:
        return b("Add", b("Tanh", value), b("Mul", residual, residual))

    for kernel, family in (((3, 3), "conv"), ((1, 1), "gemm")):
        node = convolution(
            (5, 6), 4, 21, kernel, image(5, 6, 21), pads=(kernel[0] // 2,) * 4,
            epilogue=scalar_body(2, write),
        )  # fmt: skip
        assert (node.call.spec.family, node.call.inplace) == (family, ())
        for n in (1, 3):
            node.check(floats(n, 5, 6, 4), floats(n, 5, 6, 21), threads=n)


def test_one_by_one_over_an_image_whose_size_is_the_batch() -> None:
    """[1, channels, n]: a sequence with a batch of one, as the end of silero-vad's layers over time."""
    data = model("float[n,8] x => float[1,k,n] y", "t = Transpose(x) u = Unsqueeze(t, zero) v = Tanh(u) "
                 "c = Conv(v, w, b) y = Sigmoid(c)",
                 f"int64[1] zero = {{0}}, float[3,8,1] w = {{{', '.join(str(i / 16) for i in range(24))}}}, "
                 "float[3] b = {0.5, 0, -0.5}")  # fmt: skip
    assert_like_onnx_runtime(data, *({"x": normal(n, 8)} for n in (3, 1, 17)))
    with lathe.compile(data, tune="off") as session:
        session.run({"x": normal(3, 8)})
        assert "FALLBACK" not in session.explain()
