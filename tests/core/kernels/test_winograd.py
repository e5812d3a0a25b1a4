"""Winograd's convolution against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from core.codegen.target import host, x86_64_v3
from core.ir.types import TensorType
from core.kernels.catalog.panels import choose_tile
from core.kernels.catalog.winograd import pack
from core.kernels.target import Target
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.test_conv import F32, N, check, convolution, floats


@pytest.mark.parametrize("target", [host(), x86_64_v3()], ids=["host", "x86-64-v3"])
@pytest.mark.parametrize(
    ("size", "channels", "outputs", "pad"),
    [((12, 12), 32, 32, 1), ((13, 18), 32, 80, 1), ((17, 15), 48, 64, 0), ((12, 14), 32, 32, 2)],
)
def test_sizes(target: Target, size: tuple[int, int], channels: int, outputs: int, pad: int) -> None:
    kernel = convolution(size, channels, outputs, (3, 3), pads=(pad,) * 4, target=target)
    assert kernel.call.spec.family == "winograd"
    for n, threads in ((1, 1), (1, 3), (3, 2)):
        kernel.check(floats(n, *size, channels), threads=threads, rtol=1e-3, atol=1e-3)


def test_error_is_small_against_the_largest_result() -> None:
    kernel = convolution((16, 16), 64, 64, (3, 3), pads=(1,) * 4, bias=False)
    x = floats(1, 16, 16, 64)
    weight = next(iter(kernel.graph.constants.values()))
    padded = np.pad(x[0].astype(np.float64), ((1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (0, 1))
    exact = np.einsum("yxcij,ocij->yxo", windows, weight.astype(np.float64))
    assert np.abs(kernel(x)[0][0] - exact).max() < 1e-5 * np.abs(exact).max()


def test_residual_epilogue_in_place() -> None:
    add = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))
    residual = TensorType(F32, (N, 14, 13, 32))
    kernel = convolution((14, 13), 32, 32, (3, 3), residual, pads=(1,) * 4, epilogue=add)
    assert (kernel.call.spec.family, kernel.call.inplace) == ("winograd", (3,))
    kernel.check(floats(2, 14, 13, 32), floats(2, 14, 13, 32), threads=2, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "attrs"),
    [
        ((7, 7), 32, (3, 3), {"pads": (1,) * 4}),
        ((16, 16), 36, (3, 3), {"pads": (1,) * 4}),
        ((16, 16), 32, (3, 3), {"strides": (2, 2)}),
        ((16, 16), 32, (3, 3), {"dilations": (2, 2)}),
        ((16, 16), 32, (5, 5), {}),
    ],
)
def test_other_convolutions_stay_direct(
    size: tuple[int, int], channels: int, kernel: tuple[int, int], attrs: dict[str, tuple[int, ...]]
) -> None:
    node = convolution(size, channels, 32, kernel, **attrs)
    assert node.call.spec.family == "conv"
    check(node, 1)


def test_packed_weights_are_four_times_as_many() -> None:
    weight = floats(64, 32, 3, 3)
    assert pack(weight, choose_tile(host(), 24, 64)).size == 4 * weight.size
