"""Winograd's convolution along one axis against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.types import TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.shared.panels import choose_tile
from lathe.core.kernels.target import Target
from lathe.core.kernels.winograd.lines_spec import pack
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.test_conv import F32, N, check, convolution, floats
from tests.core.targets import each_wide, vectors


@pytest.mark.sample(3, native=True)
@each_wide
@pytest.mark.parametrize(
    ("size", "channels", "outputs", "pads"),
    [
        ((20, 22), 3, 64, (3, 3, 3, 3)),
        ((33, 17), 3, 32, (3, 3, 2, 2)),
        ((24, 40), 1, 48, (0, 0, 0, 0)),
        ((40, 41), 4, 80, (3, 0, 0, 3)),
        ((19, 18), 15, 32, (1, 4, 6, 2)),
    ],
)
def test_sizes(target: Target, size: tuple[int, int], channels: int, outputs: int, pads: tuple[int, ...]) -> None:
    kernel = convolution(size, channels, outputs, (7, 7), pads=pads, strides=(2, 2), target=target)
    assert kernel.call.spec.family == "winograd_lines"
    for n, threads in ((1, 1), (1, 3), (3, 2)):
        kernel.check(floats(n, *size, channels), threads=threads, rtol=1e-4, atol=1e-4)


def test_error_is_small_against_the_largest_result() -> None:
    kernel = convolution((64, 64), 3, 64, (7, 7), pads=(3,) * 4, strides=(2, 2), bias=False)
    x = floats(1, 64, 64, 3)
    weight = next(iter(kernel.graph.constants.values()))
    padded = np.pad(x[0].astype(np.float64), ((3, 3), (3, 3), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), (0, 1))[::2, ::2]
    exact = np.einsum("yxcij,ocij->yxo", windows, weight.astype(np.float64))
    assert np.abs(kernel(x)[0][0] - exact).max() < 5e-6 * np.abs(exact).max()


def test_residual_epilogue_in_place() -> None:
    add = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))
    residual = TensorType(F32, (N, 10, 11, 32))
    kernel = convolution((20, 22), 3, 32, (7, 7), residual, pads=(3,) * 4, strides=(2, 2), epilogue=add)
    assert (kernel.call.spec.family, kernel.call.inplace) == ("winograd_lines", (3,))
    kernel.check(floats(2, 20, 22, 3), floats(2, 10, 11, 32), threads=2, rtol=1e-4, atol=1e-4)


def test_the_direct_convolution_is_a_candidate_of_the_tuner() -> None:
    node = convolution((32, 32), 3, 32, (7, 7), pads=(3,) * 4, strides=(2, 2))
    offered = candidates(Request(node.node, node.graph.constants, vectors()))
    assert {call.spec.family for call in offered} == {"winograd_lines", "conv"}
    exact = candidates(Request(node.node, node.graph.constants, vectors(), winograd=False))
    assert {call.spec.family for call in exact} == {"conv"}


@pytest.mark.parametrize(
    ("channels", "kernel", "strides"), [(3, 7, (1, 1)), (3, 7, (2, 1)), (3, 5, (2, 2)), (16, 7, (2, 2))]
)
def test_other_convolutions_stay_direct(channels: int, kernel: int, strides: tuple[int, int]) -> None:
    node = convolution((20, 20), channels, 32, (kernel, kernel), pads=(3,) * 4, strides=strides)
    assert node.call.spec.family == "conv"
    check(node, 1)


def test_packed_weights_are_almost_twice_the_weights() -> None:
    weight = floats(64, 3, 7, 7)
    assert pack(weight, choose_tile(vectors(), 112, 64)).size == weight.size * 13 // 7
