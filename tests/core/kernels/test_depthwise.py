"""Depthwise convolutions against NumPy."""

from __future__ import annotations

from typing import Any

import pytest

from core.ir.types import TensorType
from core.kernels.target import Target
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.test_conv import F32, TARGETS, N, check, convolution, floats


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


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
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


def test_residual_epilogue() -> None:
    add = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))
    residual = TensorType(F32, (N, 6, 10, 20))
    kernel = convolution((6, 10), 20, 20, (3, 3), residual, group=20, pads=(1, 1, 1, 1), epilogue=add)
    assert kernel.call.inplace == (3,)
    kernel.check(floats(2, 6, 10, 20), floats(2, 6, 10, 20), threads=2)
