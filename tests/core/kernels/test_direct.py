"""Convolutions of few channels, with and without pooling, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest

from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel, scalar_body
from tests.core.kernels.test_conv import check, convolution, floats, image
from tests.core.targets import each_target

RELU = scalar_body(1, lambda b, x: b("Relu", x))


def pooled(size: tuple[int, int], outputs: int, pool: str = "max", target: Target | None = None) -> NodeKernel:
    return NodeKernel(
        "PooledConv", image(*size, 2), floats(outputs, 2, 3, 3), floats(outputs),
        layout="NHWC", pads=(1, 1, 1, 1), pool=pool, epilogue=RELU, target=target,
    )  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("outputs", [1, 2, 5, 8])
def test_channels(channels: int, outputs: int) -> None:
    kernel = convolution((7, 9), channels, outputs, (3, 3), pads=(1, 1, 1, 1), epilogue=RELU)
    assert kernel.call.spec.family == "direct"
    check(kernel, 1, 3, threads=2)


@pytest.mark.parametrize("width", [5, 16, 17, 33, 52])
def test_widths(width: int) -> None:
    check(convolution((6, width), 1, 6, (5, 5), pads=(2, 2, 2, 2)), 1, 2)


@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [
        ((5, 5), {}),
        ((1, 3), {"pads": (0, 1, 0, 1)}),
        ((3, 2), {"strides": (2, 1), "pads": (0, 1, 2, 0)}),
        ((3, 3), {"dilations": (2, 3), "pads": (2, 3, 2, 3)}),
        ((4, 11), {"strides": (3, 1), "pads": (3, 10, 0, 0)}),
    ],
)
def test_windows(kernel: tuple[int, int], attrs: dict[str, Any]) -> None:
    check(convolution((9, 12), 2, 3, kernel, **attrs), 2)


def test_images_in_bands() -> None:
    kernel = convolution((65, 150), 3, 4, (3, 3), pads=(1, 1, 1, 1))
    assert kernel.call.spec.band < 65  # type: ignore[attr-defined]
    check(kernel, 1, 2, threads=3)


@pytest.mark.parametrize("size", [(2, 2), (7, 9), (28, 28), (3, 70)])
@pytest.mark.parametrize("pool", ["max", "average"])
def test_pooling(size: tuple[int, int], pool: str) -> None:
    check(pooled(size, 6, pool), 1, 3, threads=2)


@each_target
def test_targets(target: Target) -> None:
    check(convolution((6, 13), 2, 7, (3, 3), pads=(1, 1, 1, 1), target=target), 1, 2, threads=3)
    check(pooled((6, 13), 7, target=target), 1, 2, threads=3)


def test_unsupported_convolutions_use_other_kernels() -> None:
    residual = scalar_body(2, lambda b, x, r: b("Add", x, r))
    for kernel in (
        convolution((6, 6), 5, 8, (3, 3)),
        convolution((6, 6), 4, 9, (3, 3)),
        convolution((6, 6), 1, 2, (3, 3), strides=(1, 2)),
        convolution((6, 6), 1, 2, (3, 3), image(4, 4, 2), epilogue=residual),
    ):
        assert kernel.call.spec.family == "conv"
