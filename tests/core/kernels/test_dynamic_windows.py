"""Convolutions and pools over images of dynamic size, channels first, against the reference and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel
from tests.core.kernels.sweep import floats, kernel, sweep
from tests.core.onnx_writer import OnnxWriter
from tests.core.targets import each_target
from tests.onnx_runtime import plain_session

SIZES = [(1, 1), (2, 3), (5, 8), (9, 17), (16, 33), (7, 40)]


def window_of(random: np.random.Generator, rank: int) -> dict[str, Any]:
    """A random window with less padding than its extent."""
    kernel = [int(size) for size in random.integers(1, 8, rank)]
    dilations = [int(step) for step in random.integers(1, 3, rank)]
    pads = [int(random.integers(0, (size + 1) // 2)) for size in (*kernel, *kernel)]
    return {"kernel_shape": kernel, "dilations": dilations, "pads": pads,
            "strides": [int(step) for step in random.integers(1, 5, rank)]}  # fmt: skip


def fits(window: dict[str, Any], sizes: tuple[int, ...]) -> bool:
    rank = len(sizes)
    facts = zip(window["kernel_shape"], window["dilations"], sizes, window["pads"], window["pads"][rank:], strict=False)
    return all((kernel - 1) * step + 1 <= size + before + after for kernel, step, size, before, after in facts)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("seed", range(12))
def test_images_with_their_channels_first(target: Target, seed: int) -> None:
    """An inaccessible page follows every operand, so vector loads must not read beyond an image."""
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 4))
    while True:
        sizes, window = tuple(int(size) for size in random.integers(1, 40, rank)), window_of(random, rank)
        if fits(window, sizes):
            break
    shape = f"float32[n,3,{','.join(map(str, sizes))}]"
    attrs: dict[str, Any] = {name: tuple(value) for name, value in window.items()}
    op = "MaxPool" if seed % 2 else "AveragePool"
    more: dict[str, Any] = {"count_include_pad": seed // 2 % 2} if op == "AveragePool" else {}
    sweep(op, shape, layout="NCHW", target=target, batches=(0, 2), **attrs, **more)


def test_pools_of_common_windows_are_vectors() -> None:
    windows: list[dict[str, Any]] = [
        {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1,) * 4},
        {"kernel_shape": (5, 5)},
    ]
    for window in windows:
        for op in ("MaxPool", "AveragePool"):
            found = kernel(op, "float32[n,8,20,20]", layout="NCHW", **window)
            assert found.call.spec.family == "open_windows"


def test_nan_propagates() -> None:
    compiled: NodeKernel = kernel("MaxPool", "float32[n,1,9,30]", kernel_shape=(3, 3), pads=(1,) * 4)
    for place in range(30):
        image = floats(1, 1, 9, 30)
        image[0, 0, place % 9, place] = np.nan
        compiled.check(image)


@pytest.mark.sample(10)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels", [1, 3, 20])
@pytest.mark.parametrize("kind", ["max", "average", "padded", "products"])
@pytest.mark.parametrize("is_last", [False, True], ids=["alone", "between convolutions"])
def test_images_of_any_size(kind: str, channels: int, threads: int, is_last: bool) -> None:
    """Between convolutions, the window operator has its channels last."""
    random = np.random.default_rng((channels, threads, len(kind)))
    for _ in range(2):
        window = window_of(random, 2)
        if any(pad >= size for pad, size in zip(window["pads"], window["kernel_shape"] * 2, strict=True)):
            continue
        data = model(kind, channels, window, is_last)
        oracle = plain_session(data)
        with lathe.compile(data, threads=threads, tune="off", new_shapes="wait") as session:
            for height, width in SIZES:
                if not fits(window, (height, width)):
                    continue
                x = random.standard_normal((2, channels, height, width)).astype(np.float32)
                got, (want,) = session.run({"x": x}), oracle.run(None, {"x": x})
                np.testing.assert_allclose(got["y"], want, 2e-5, 2e-5, err_msg=f"{window} {height} {width}")


def model(kind: str, channels: int, window: dict[str, Any], is_last: bool) -> bytes:
    w = OnnxWriter(channels)

    def point(x: str) -> str:
        return w.op("Relu", w.op("Conv", x, w.weight(channels, channels, 1, 1)))

    x = point("x") if is_last else "x"
    if kind == "products":
        weight = w.weight(channels, 1, *window["kernel_shape"])
        y = w.op("Conv", x, weight, group=channels, **{k: v for k, v in window.items() if k != "kernel_shape"})
    elif kind == "max":
        y = w.op("MaxPool", x, **window)
    else:
        y = w.op("AveragePool", x, count_include_pad=int(kind == "padded"), **window)
    w.op("Neg", point(y) if is_last else y, name="y")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", channels, "h", "w"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(w.nodes, "windows", inputs, outputs, w.constants)
    opsets = [helper.make_opsetid("", 19)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
