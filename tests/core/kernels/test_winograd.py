"""Winograd's convolution against NumPy: large tiles, and small ones for small images."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from lathe.core.ir.types import TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.shared.panels import choose_tile
from lathe.core.kernels.target import Target
from lathe.core.kernels.winograd.lines_spec import LINES
from lathe.core.kernels.winograd.spec import LARGE, PART, SMALL, STRIDED, Cover, Form, WinogradSpec, pack
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.test_conv import F32, N, check, convolution, floats
from tests.core.targets import each_wide, vectors


@pytest.mark.sample(2)
@each_wide
@pytest.mark.parametrize(
    ("size", "channels", "outputs", "pad"),
    [
        ((12, 12), 32, 32, 1),
        ((13, 18), 32, 80, 1),
        ((17, 15), 48, 64, 0),
        ((12, 14), 32, 32, 2),
        ((7, 7), 32, 48, 1),
        ((8, 15), 48, 32, 0),
        ((9, 8), 32, 32, 1),
    ],
)
def test_sizes(target: Target, size: tuple[int, int], channels: int, outputs: int, pad: int) -> None:
    kernel = convolution(size, channels, outputs, (3, 3), pads=(pad,) * 4, target=target)
    assert kernel.call.spec.family == "winograd"
    for n, threads in ((1, 1), (1, 3), (3, 2)):
        kernel.check(floats(n, *size, channels), threads=threads, rtol=1e-3, atol=1e-3)


@pytest.mark.sample(3, native=True)
@each_wide
@pytest.mark.parametrize(
    ("size", "channels", "outputs", "pads"),
    [
        ((12, 12), 32, 32, (1, 1, 1, 1)),
        ((13, 18), 32, 80, (1, 1, 1, 1)),
        ((14, 15), 48, 64, (0, 1, 1, 0)),
        ((17, 14), 64, 256, (0, 0, 0, 0)),
        ((12, 13), 32, 48, (2, 0, 1, 2)),
    ],
)
def test_strides(target: Target, size: tuple[int, int], channels: int, outputs: int, pads: tuple[int, ...]) -> None:
    kernel = convolution(size, channels, outputs, (3, 3), pads=pads, strides=(2, 2), target=target)
    assert "3x3 by 2 winograd 2x2" in kernel.call.spec.summary
    for n, threads in ((1, 1), (1, 3), (5, 2)):
        kernel.check(floats(n, *size, channels), threads=threads, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize(("size", "stride"), [(16, 1), (14, 1), (7, 1), (28, 2), (14, 2)])
def test_error_is_small_against_the_largest_result(size: int, stride: int) -> None:
    kernel = convolution((size, size), 64, 64, (3, 3), pads=(1,) * 4, strides=(stride, stride), bias=False)
    x = floats(1, size, size, 64)
    weight = next(iter(kernel.graph.constants.values()))
    padded = np.pad(x[0].astype(np.float64), ((1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (0, 1))[::stride, ::stride]
    exact = np.einsum("yxcij,ocij->yxo", windows, weight.astype(np.float64))
    assert kernel.call.spec.family == "winograd"
    assert np.abs(kernel(x)[0][0] - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("stride", [1, 2])
def test_the_direct_convolution_is_a_candidate_of_the_tuner(stride: int) -> None:
    node = convolution((16, 16), 32, 32, (3, 3), pads=(1,) * 4, strides=(stride, stride))
    offered = candidates(Request(node.node, node.graph.constants, vectors()))
    assert {call.spec.family for call in offered} == {"winograd", "conv"}
    exact = candidates(Request(node.node, node.graph.constants, vectors(), winograd=False))
    assert {call.spec.family for call in exact} == {"conv"}


def test_residual_epilogue_in_place() -> None:
    add = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))
    residual = TensorType(F32, (N, 14, 13, 32))
    kernel = convolution((14, 13), 32, 32, (3, 3), residual, pads=(1,) * 4, epilogue=add)
    assert (kernel.call.spec.family, kernel.call.inplace) == ("winograd", (3,))
    kernel.check(floats(2, 14, 13, 32), floats(2, 14, 13, 32), threads=2, rtol=1e-3, atol=1e-3)


@pytest.mark.sample(3, native=True)
@each_wide
@pytest.mark.parametrize(("size", "stride"), [((14, 13), 1), ((7, 9), 1), ((15, 14), 2)])
def test_long_epilogues_run_over_the_results_of_a_tile(target: Target, size: tuple[int, int], stride: int) -> None:
    """The code of a long epilogue is generated once for all results of a tile, not once for each of them."""
    long = scalar_body(2, lambda b, x, y: b("Add", b("Tanh", x), b("Mul", x, b("Sigmoid", b("Sub", x, y)))))
    counts = [-(-extent // stride) for extent in size]
    residual = TensorType(F32, (N, *counts, 48))
    kernel = convolution(
        size, 32, 48, (3, 3), residual, pads=(1,) * 4, strides=(stride,) * 2, epilogue=long, target=target
    )
    assert (kernel.call.spec.family, kernel.call.inplace) == ("winograd", (3,))
    for n, threads in ((1, 1), (2, 3), (5, 2)):
        feeds = floats(n, *size, 32), floats(n, *counts, 48)
        kernel.check(*feeds, threads=threads, rtol=1e-3, atol=1e-3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("outputs", [32, 112, 208])
@pytest.mark.parametrize("size", [14, 26])
def test_threads_with_few_tiles_share_the_weights(size: int, outputs: int, stride: int) -> None:
    add = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))
    count = size // stride
    residual = TensorType(F32, (N, count, count, outputs))
    kernel = convolution(
        (size, size), 32, outputs, (3, 3), residual, pads=(1,) * 4, strides=(stride, stride), epilogue=add
    )
    assert kernel.call.spec.family == "winograd"
    for n in (1, 2, 5):
        for threads in (1, 2, 3, 5):
            feeds = floats(n, size, size, 32), floats(n, count, count, outputs)
            kernel.check(*feeds, threads=threads, rtol=1e-3, atol=1e-3)


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize(
    ("size", "channels", "kernel", "attrs"),
    [
        ((5, 9), 32, (3, 3), {"pads": (1,) * 4}),
        ((16, 16), 36, (3, 3), {"pads": (1,) * 4}),
        ((16, 16), 32, (3, 3), {"strides": (2, 1)}),
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


@pytest.mark.parametrize(("form", "times"), [(LARGE, 36 / 9), (SMALL, 16 / 9), (STRIDED, 25 / 9)])
def test_packed_weights_are_more_than_the_weights(form: Form, times: float) -> None:
    weight = floats(64, 32, 3, 3)
    assert pack(weight, choose_tile(vectors(), 24, 64), form).size == round(times * weight.size)


def test_small_tiles_use_a_subset_of_the_packed_weights() -> None:
    points = (*LARGE.points, inf)
    assert PART.weight == tuple(LARGE.weight[points.index(point)] for point in (*PART.points, inf))


@pytest.mark.parametrize("size", [(7, 7), (8, 15), (11, 6)])
def test_the_number_of_small_images_selects_the_tile(size: tuple[int, int]) -> None:
    """Both tile sizes use the same weights, and errors are equally small."""
    kernel = convolution(size, 32, 48, (3, 3), pads=(1,) * 4)
    spec = kernel.call.spec
    assert isinstance(spec, WinogradSpec) and spec.part is PART and spec.form is LARGE
    assert 1 < spec.many < 8 and f"4x4 from n = {spec.many}, 2x2 below" in spec.summary
    for n, threads in ((spec.many - 1, 1), (spec.many, 1), (spec.many, 2), (2 * spec.many + 1, 1)):
        kernel.check(floats(n, *size, 32), threads=threads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "stride"), [(14, 1), (7, 1), (14, 2)])
def test_weights_beyond_the_l2_cache_may_be_shared_by_more_tiles(size: int, stride: int) -> None:
    target = replace(vectors(), l2_bytes=1 << 14)
    node = convolution((size, size), 32, 32, (3, 3), pads=(1,) * 4, strides=(stride, stride), target=target)
    first, *others = candidates(Request(node.node, node.graph.constants, target))
    [other] = [call for call in others if call.spec.family == "winograd"]
    assert isinstance(first.spec, WinogradSpec) and isinstance(other.spec, WinogradSpec)
    assert other.spec.block == 2 * first.spec.block
    node.note_run(other)
    for n, threads in ((1, 1), (1, 2), (5, 2)):
        node.check(floats(n, size, size, 32), threads=threads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [LARGE, SMALL, STRIDED, LINES, PART])
def test_transforms_convolve_exactly_in_exact_arithmetic(form: Form) -> None:
    """Each part of a strided line uses its own rows of the weights; products are added point by point."""
    image, result, weight = (np.array(matrix) for matrix in (form.image, form.result, form.weight))
    line, taps = np.arange(form.input) ** 2.0, np.array([2.0, -1.0, 3.0, 5.0, 0.5, -2.0, 7.0])[: form.taps]
    products = np.zeros(form.evaluations)
    for part in range(form.stride):
        places = line[part :: form.stride][: form.evaluations]
        rows = form.evaluations if part == 0 else form.evaluations - 1
        of_part = [i for i in range(form.line_products) if i % form.stride == part]
        products[:rows] += (image[:rows, : len(places)] @ places) * (weight[of_part] @ taps)
    expected = np.correlate(line, taps, "valid")[:: form.stride]
    np.testing.assert_allclose(result @ products, expected)


@pytest.mark.parametrize(
    ("count", "form", "tiles", "short"),
    [(14, LARGE, 4, 2), (16, LARGE, 4, 0), (5, LARGE, 2, 2), (7, SMALL, 4, 1), (8, SMALL, 4, 0), (7, STRIDED, 4, 1)],
)
def test_short_tiles_avoid_work_beyond_the_image(count: int, form: Form, tiles: int, short: int) -> None:
    cover = Cover(count, form.output)
    assert (cover.tiles, cover.short) == (tiles, short)
    assert cover.whole * form.output + short * (form.output - 1) >= count
