"""Depthwise convolutions against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel, scalar_body, single_node
from tests.core.kernels.test_conv import F32, N, check, convolution, floats
from tests.core.targets import each_target, vectors


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("channels", [2, 7, 16, 33])
@pytest.mark.parametrize("width", [1, 3, 12, 30])
def test_channel_and_column_tails(channels: int, width: int) -> None:
    kernel = convolution((5, width), channels, channels, (3, 3), group=channels, pads=(1, 1, 1, 1))
    assert kernel.call.spec.family == "depthwise"
    check(kernel, 1, 3, threads=2)


@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [
        ((5, 5), {"pads": (2, 2, 2, 2)}),
        ((3, 3), {"strides": (2, 2), "pads": (0, 1, 1, 0)}),
        ((5, 3), {"strides": (2, 1), "pads": (2, 1, 2, 1)}),
        ((3, 3), {"dilations": (2, 3), "pads": (2, 3, 2, 3)}),
        ((7, 7), {"pads": (3, 3, 3, 3)}),
        ((3, 3), {}),
        ((2, 2), {"strides": (4, 4), "pads": (1, 1, 1, 1)}),
    ],
)
def test_windows(kernel: tuple[int, int], attrs: dict[str, Any]) -> None:
    check(convolution((9, 11), 20, 20, kernel, group=20, **attrs), 2)


@each_target
def test_targets(target: Target) -> None:
    check(convolution((6, 13), 21, 21, (3, 3), group=21, pads=(1, 1, 1, 1), target=target), 1, 2, threads=3)


def test_one_dimensional() -> None:
    check(convolution((13,), 6, 6, (3,), group=6, pads=(1, 1)), 2)


def test_three_dimensional_runs_as_groups() -> None:
    kernel = convolution((3, 4, 5), 4, 4, (3, 3, 3), group=4, pads=(1,) * 6)
    assert kernel.call.spec.family == "conv"
    check(kernel, 2)


def test_several_outputs_per_channel_run_as_groups() -> None:
    kernel = convolution((5, 6), 4, 8, (3, 3), group=4, pads=(1,) * 4)
    assert kernel.call.spec.family == "conv"
    check(kernel, 2)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("fill", [0, 17])
@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [((3, 3), {"pads": (1, 1, 1, 1)}), ((5, 3), {"strides": (2, 2), "pads": (2, 0, 1, 1)}), ((7,), {"pads": (3, 3)})],
)
def test_bytes_add_up_exactly(kernel: tuple[int, ...], attrs: dict[str, Any], fill: int, target: Target) -> None:
    """With the largest weights and pixels, a padding value, and an integer bias."""
    rng = np.random.default_rng(fill)
    size = (9, 13)[-len(kernel) :]
    weight, bias = rng.integers(-128, 128, (21, 1, *kernel), np.int8), rng.integers(-(1 << 20), 1 << 20, 21, np.int32)
    weight[0] = -128
    made = NodeKernel(
        "FusedConv", TensorType(DType.UINT8, (N, *size, 21)), weight, bias,
        layout="NHWC", group=21, pad_value=fill, target=target, **attrs,
    )  # fmt: skip
    assert made.call.spec.family == "depthwise"
    x = rng.integers(0, 256, (3, *size, 21), np.uint8)
    x[0] = 255
    made.check(x, threads=2, rtol=0, atol=0)


@each_target
def test_bytes_of_one_channel_more_than_a_vector_leave_the_next_pixel_alone(target: Target) -> None:
    rng = np.random.default_rng(0)
    channels = target.lanes + 1
    whole = scalar_body(1, lambda b, x: b("Cast", x, to=DType.UINT8.onnx_code), DType.INT32)
    made = NodeKernel(
        "FusedConv", TensorType(DType.UINT8, (N, 5, 7, channels)), rng.integers(0, 2, (channels, 1, 1, 1), np.int8),
        layout="NHWC", group=channels, pads=(0,) * 4, epilogue=whole, target=target,
    )  # fmt: skip
    made.check(rng.integers(0, 256, (2, 5, 7, channels), np.uint8), rtol=0, atol=0)


def test_windows_whose_bytes_do_not_fit_a_float_have_no_kernel() -> None:
    weight = np.zeros((2, 1, 23, 23), np.int8)
    node = single_node(
        "FusedConv", TensorType(DType.UINT8, (N, 30, 30, 2)), weight, layout="NHWC", group=2, pads=(0,) * 4
    )
    assert select(Request(node.nodes[0], node.constants, vectors())) is None


def test_residual_epilogue() -> None:
    add = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))
    residual = TensorType(F32, (N, 6, 10, 20))
    kernel = convolution((6, 10), 20, 20, (3, 3), residual, group=20, pads=(1, 1, 1, 1), epilogue=add)
    assert kernel.call.inplace == (3,)
    kernel.check(floats(2, 6, 10, 20), floats(2, 6, 10, 20), threads=2)
