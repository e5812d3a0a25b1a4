"""Products and convolutions on matrix tiles (AMX). On other machines only their plans are checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lathe.core.codegen.target import avx512, host
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.amx.spec import FlatImages, words_per_step
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import candidates, select
from lathe.core.kernels.shared.window import Window
from tests.core.kernels.harness import NodeKernel, scalar_body, single_node
from tests.core.kernels.test_dot_product_words import floats, halves, narrowing, signed, unsigned

F32, BF16, F16, U8 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.UINT8
N = symbol("n")
needs_tiles = pytest.mark.skipif(not host().has_tiles(BF16), reason="this machine has no matrix tiles (AMX)")


def having(dtype: DType) -> Any:
    reason = f"this machine has no matrix tiles of {dtype} (AMX)"
    return pytest.param(dtype, marks=pytest.mark.skipif(not host().has_tiles(dtype), reason=reason))


each_narrow = pytest.mark.parametrize("dtype", [having(BF16), having(F16)], ids=["bfloat16", "float16"])


def on_tiles(op: str, *args: Any, **attrs: Any) -> NodeKernel:
    kernel = NodeKernel(op, *args, target=host(), **attrs)
    assert kernel.call.spec.family == "amx"
    return kernel


@each_narrow
@pytest.mark.parametrize(("depth", "columns"), [(20, 5), (32, 100), (64, 48), (144, 17)])
def test_products_of_all_heights_and_widths(depth: int, columns: int, dtype: DType) -> None:
    kernel = on_tiles("FusedMatMul", TensorType(dtype, (N, depth)), floats(depth, columns))
    for rows, threads in ((0, 1), (1, 1), (7, 2), (16, 1), (17, 1), (31, 4), (32, 1), (33, 3), (49, 1), (100, 3)):
        kernel.check(halves(rows, depth, dtype=dtype), threads=threads, rtol=1e-5, atol=1e-5 * depth)


@needs_tiles
def test_rows_are_cut_into_bands() -> None:
    kernel = on_tiles("FusedMatMul", TensorType(BF16, (N, 4096)), floats(4096, 40))
    spec = kernel.call.spec
    assert spec.band < 250  # type: ignore[attr-defined]
    kernel.check(halves(250, 4096), threads=2, rtol=1e-4, atol=2e-2)


@needs_tiles
def test_residuals_are_replaced_where_blocks_overlap() -> None:
    body = scalar_body(2, lambda b, x, rest: b("Relu", b("Add", x, rest)))
    kernel = on_tiles("FusedMatMul", TensorType(BF16, (N, 32)), floats(32, 33), TensorType(F32, (N, 33)), epilogue=body)
    assert kernel.call.inplace == (2,)
    kernel.check(halves(41, 32), floats(41, 33), rtol=1e-4, atol=1e-3)


@each_narrow
def test_long_epilogues_narrow(dtype: DType) -> None:
    body = narrowing(2, lambda b, x, bias: b("Mul", b("Sigmoid", b("Add", x, bias)), b("Tanh", x)), dtype)
    kernel = on_tiles("FusedMatMul", TensorType(dtype, (N, 32)), floats(32, 37), floats(37), epilogue=body)
    kernel.check(halves(19, 32, dtype=dtype), threads=2, rtol=1e-2, atol=1e-5)


CONVOLUTIONS = [
    (32, 40, (3, 3), {"pads": (1, 1, 1, 1)}),
    (48, 20, (3, 3), {"pads": (0, 1, 1, 0), "strides": (2, 2)}),
    (32, 20, (1, 1), {"strides": (2, 2)}),
    (16, 20, (3, 2), {"dilations": (2, 1)}),
    (16, 17, (5, 5), {"pads": (2, 2, 1, 1), "strides": (3, 3)}),
    (16, 20, (1, 2), {"pads": (2, 4, 2, 4)}),
]


@each_narrow
@pytest.mark.parametrize(("channels", "outputs", "kernel", "attrs"), CONVOLUTIONS)
def test_convolutions(
    channels: int, outputs: int, kernel: tuple[int, int], attrs: dict[str, Any], dtype: DType
) -> None:
    image, weight = TensorType(dtype, (N, 9, 13, channels)), floats(outputs, channels, *kernel)
    node = on_tiles("FusedConv", image, weight, floats(outputs), layout="NHWC", **attrs)
    for n, threads in ((0, 1), (1, 1), (3, 2), (1, 4)):
        node.check(halves(n, 9, 13, channels, dtype=dtype), threads=threads, rtol=1e-3, atol=1e-3)


@needs_tiles
def test_bands_are_parts_of_large_images_and_several_small_ones() -> None:
    for size, n in ((60, 1), (7, 25)):
        weight = floats(8, 128, 3, 3)
        node = on_tiles("FusedConv", TensorType(BF16, (N, size, size, 128)), weight, layout="NHWC", pads=(1,) * 4)
        flat = node.call.spec.flat  # type: ignore[attr-defined]
        assert (flat.parts > 1) if size == 60 else (1 < flat.images < n)
        node.check(halves(n, size, size, 128), threads=2, rtol=1e-3, atol=5e-3)


@needs_tiles
def test_bytes_are_exact_around_their_zero() -> None:
    kernel = on_tiles("FusedMatMul", TensorType(U8, (N, 64)), signed(64, 48))
    kernel.check(unsigned(41, 64), rtol=0, atol=0)
    weight, image = signed(20, 64, 3, 3), TensorType(U8, (N, 13, 14, 64))
    conv = on_tiles("FusedConv", image, weight, layout="NHWC", pad_value=77, pads=(1, 1, 0, 1))
    conv.check(unsigned(2, 13, 14, 64), threads=2, rtol=0, atol=0)


def worst(actual: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    """The largest error, relative to the largest result."""
    return float(np.abs(actual - exact).max() / np.abs(exact).max())


@needs_tiles
@pytest.mark.parametrize("depth", [20, 144, 1024])
def test_float32_in_three_parts_is_as_exact_as_multiply_adds(depth: int) -> None:
    a, b = floats(25, 4, depth), floats(depth, 48)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    rough, fine = (TensorType(F32, (N, 4, depth)), b), 2 * np.finfo(np.float32).eps
    split = on_tiles("FusedMatMul", *rough)
    plain = NodeKernel("FusedMatMul", *rough)
    assert plain.call.spec.family == "gemm"
    assert worst(split(a, threads=2)[0], exact) <= max(worst(plain(a)[0], exact), fine)
    fast = NodeKernel("FusedMatMul", *rough, target=replace(host(), tf32=True))
    assert fast.call.spec.parts == 2  # type: ignore[attr-defined]
    assert fine < worst(fast(a)[0], exact) < 2**-16


@needs_tiles
@pytest.mark.parametrize("threads", [1, 3])
def test_convolutions_of_float32_are_split_where_they_are_copied(threads: int) -> None:
    for channels, attrs in ((24, {"pads": (1,) * 4}), (64, {"strides": (2, 2), "pads": (0, 1, 1, 0)})):
        node = on_tiles("FusedConv", TensorType(F32, (N, 9, 13, channels)), floats(33, channels, 3, 3), floats(33),
                        layout="NHWC", **attrs)  # fmt: skip
        node.check(floats(2, 9, 13, channels), threads=threads, atol=2e-5)


@needs_tiles
def test_float32_keeps_its_range() -> None:
    kernel = on_tiles("FusedMatMul", TensorType(F32, (N, 4, 32)), np.eye(32, dtype=np.float32))
    x = np.outer([1e-30, -1e-10, 1.0, 1e30, 3e38], np.linspace(0.1, 1, 32)).astype(np.float32)
    kernel.check(np.tile(x, (20, 1)).reshape(25, 4, 32), rtol=1e-6, atol=0)


@needs_tiles
@pytest.mark.parametrize(("tf32", "most"), [(False, np.finfo(np.float32).max), (True, 3.4e38)])
def test_numbers_beyond_bfloat16_are_split_without_overflow(tf32: bool, most: float) -> None:
    target, image = replace(host(), tf32=tf32), TensorType(F32, (N, 4, 32))
    x = np.ones((25, 4, 32), np.float32)
    x[3], x[7, 1, 5], x[9] = most, -most, np.nan
    for factor, given in ((1, x), (-most, np.ones_like(x))):
        kernel = NodeKernel("FusedMatMul", image, np.diag(np.full(32, factor, np.float32)), target=target)
        assert kernel.call.spec.family == "amx"
        kernel.check(given, rtol=2**-16 if tf32 else 1e-7, atol=0)


@needs_tiles
def test_few_rows_leave_weights_in_float32() -> None:
    """As three bfloat16 parts weights take 3/2 of the memory, and with few rows reading them is the whole cost."""
    graph = single_node("FusedMatMul", TensorType(F32, (N, 64)), floats(64, 48))
    call = select(Request(graph.nodes[0], graph.constants, host()))
    assert call is not None and call.spec.family == "gemm"


@needs_tiles
def test_winograd_is_preferred_where_it_multiplies_least() -> None:
    def families(stride: int, tf32: bool = False) -> list[str]:
        image, attrs = TensorType(F32, (N, 14, 14, 32)), {"pads": (1,) * 4, "strides": (stride,) * 2}
        graph = single_node("FusedConv", image, floats(32, 32, 3, 3), layout="NHWC", **attrs)
        target = replace(host(), tf32=tf32)
        return [call.spec.family for call in candidates(Request(graph.nodes[0], graph.constants, target))]

    assert families(1)[:2] == ["winograd", "amx"]
    assert families(2)[0] == families(1, tf32=True)[0] == "amx"


@needs_tiles
def test_products_by_definition_are_not_split() -> None:
    graph = single_node("FusedMatMul", TensorType(F32, (N, 9, 64)), floats(64, 48))
    request = Request(graph.nodes[0], graph.constants, host(), winograd=False)
    assert {call.spec.family for call in candidates(request)} == {"gemm"}


@needs_tiles
def test_kernels_without_tiles_stay_candidates() -> None:
    graph = single_node("FusedMatMul", TensorType(BF16, (N, 64)), floats(64, 48))
    families = [call.spec.family for call in candidates(Request(graph.nodes[0], graph.constants, host()))]
    assert families[0] == "amx" and "gemm" in families[1:]


def test_targets_without_tiles_get_other_kernels() -> None:
    graph = single_node("FusedMatMul", TensorType(BF16, (N, 64)), floats(64, 48))
    for target in (avx512(), host().without_tiles):
        assert not target.has_tiles(BF16)
        call = select(Request(graph.nodes[0], graph.constants, target))
        assert call is not None and call.spec.family == "gemm"


def test_an_odd_number_of_float16_does_not_run_on_tiles() -> None:
    graph = single_node("FusedMatMul", TensorType(F16, (N, 65)), floats(65, 48))
    assert all(call.spec.family == "gemm" for call in candidates(Request(graph.nodes[0], graph.constants, host())))


def test_depths_are_cut_evenly() -> None:
    assert [words_per_step(depth) for depth in (8, 16, 20, 48, 72, 37, 4, 0)] == [8, 16, 10, 16, 12, None, None, None]


WINDOWS = [
    (Window(9, 9, 3, 1, 1, 1, 1), Window(13, 13, 3, 1, 1, 1, 1), 27),
    (Window(9, 9, 3, 1, 1, 1, 1), Window(13, 12, 3, 1, 1, 1, 0), 4),
    (Window(9, 5, 3, 2, 1, 1, 1), Window(13, 7, 3, 2, 1, 1, 1), 10),
    (Window(9, 5, 3, 1, 2, 0, 0), Window(13, 13, 3, 1, 2, 2, 2), 2),
    (Window(9, 3, 5, 3, 1, 2, 1), Window(13, 4, 5, 3, 1, 2, 1), 3),
    (Window(9, 13, 1, 1, 1, 2, 2), Window(13, 20, 2, 1, 1, 4, 4), 39),  # borders wider than the windows
]


@pytest.mark.parametrize(("y", "x", "lines"), WINDOWS)
def test_every_tap_reads_its_pixel(y: Window, x: Window, lines: int) -> None:
    """Each pixel holds its own number, with 0 outside; the expected planes follow from the definition."""
    flat = FlatImages((y, x), lines)
    images = np.arange(1, flat.images * y.size * x.size + 1).reshape(-1, y.size, x.size)
    room = ((0, 0), *((w.before, w.after + w.kernel * w.dilation + w.stride) for w in (y, x)))
    padded = np.pad(images, room)
    planes = np.zeros((len(flat.planes), flat.plane_pixels), int)
    for plane, (a, b) in zip(planes, flat.planes, strict=True):
        for number, image in enumerate(padded):
            for i in range(flat.image_lines):
                line = image[i * y.stride + a, b :: x.stride][: flat.pitch]
                at = number * flat.image_pitch + i * flat.pitch
                plane[at : at + len(line)] = line
    for result, place in enumerate(flat.places):
        number, (line, column) = result // (y.count * x.count), divmod(result, x.count)
        for tap, (i, j) in zip(flat.taps, np.ndindex(y.kernel, x.kernel), strict=True):
            row = line % y.count * y.stride + i * y.dilation
            assert planes[tap.plane, place + tap.shift] == padded[number, row, column * x.stride + j * x.dilation]
    assert sorted(set(flat.places)) == list(flat.places)
    assert max(flat.places) + max(tap.shift for tap in flat.taps) + 32 <= flat.plane_pixels
