"""Kernels for batch-last images with computed weights: convolution, both gradients, and that of MaxPool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from lathe.core.ops.opdef.terms import Writer
from tests.core.kernels.harness import NodeKernel, single_node
from tests.core.targets import each_target, vectors

F32 = DType.FLOAT32
WINDOWS: list[dict[str, Any]] = [
    {},
    {"pads": (1, 1, 1, 1)},
    {"pads": (2, 0, 1, 3)},
    {"strides": (2, 1), "pads": (1, 2, 0, 1)},
    {"strides": (2, 3), "dilations": (1, 2), "pads": (1, 1, 2, 2)},
]
DIMS = [(1, 6, 64), (3, 17, 9), (5, 2, 83), (2, 5, 16), (4, 9, 33)]  # channels, outputs, rows
each_case = pytest.mark.parametrize(("window", "dims"), list(zip(WINDOWS, DIMS, strict=True)), ids=str)


def tensor(*shape: int) -> TensorType:
    return TensorType(F32, shape)


def floats(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).uniform(-1, 1, shape).astype(np.float32)


def run(op: str, *shapes: tuple[int, ...], target: Target, threads: int = 1, **attrs: Any) -> NodeKernel:
    kernel = NodeKernel(op, *(tensor(*shape) for shape in shapes), target=target, layout="CHWN", **attrs)
    kernel.check(*(floats(*shape) for shape in shapes), threads=threads, atol=1e-4)  # sums of thousands of products
    return kernel


def result_size(size: int, kernel: int, axis: int, window: dict[str, Any]) -> int:
    pads = window.get("pads", (0, 0, 0, 0))
    reach = (kernel - 1) * window.get("dilations", (1, 1))[axis] + 1
    return int((size + pads[axis] + pads[axis + 2] - reach) // window.get("strides", (1, 1))[axis] + 1)


@each_target
@each_case
def test_convolution(target: Target, window: dict[str, Any], dims: tuple[int, int, int]) -> None:
    channels, outputs, rows = dims
    shapes = ((channels, 7, 9, rows), (outputs, channels, 3, 2), (outputs,))
    run("FusedConv", *shapes, target=target, threads=1 + rows % 2, **window)


@each_target
@each_case
def test_weight_gradient(target: Target, window: dict[str, Any], dims: tuple[int, int, int]) -> None:
    channels, outputs, rows = dims
    lines, columns = result_size(7, 3, 0, window), result_size(9, 2, 1, window)
    shapes = ((channels, 7, 9, rows), (outputs, lines, columns, rows))
    run("ConvWeightGradient", *shapes, target=target, threads=1 + rows % 2, kernel_shape=(3, 2), **window)


@each_target
@pytest.mark.parametrize("window", [*WINDOWS, {"strides": (3, 2), "output_padding": (2, 1)}], ids=str)
def test_image_gradient(target: Target, window: dict[str, Any]) -> None:
    run("ConvTranspose", (7, 6, 7, 41), (7, 3, 3, 2), (3,), target=target, **window)


@each_target
@pytest.mark.parametrize(("group", "inputs", "outputs"), [(2, 4, 6), (5, 5, 5), (3, 3, 9)])
def test_groups(target: Target, group: int, inputs: int, outputs: int) -> None:
    """Also depthwise, where every channel is a group."""
    attrs: Any = {"target": target, "group": group, "strides": (2, 1), "pads": (1, 1, 1, 1), "threads": 2}
    images, results = (inputs, 7, 6, 19), (outputs, 4, 6, 19)
    run("FusedConv", images, (outputs, inputs // group, 3, 3), (outputs,), **attrs)
    run("ConvTranspose", results, (outputs, inputs // group, 3, 3), **attrs)
    run("ConvWeightGradient", images, results, kernel_shape=(3, 3), **attrs)


@each_target
@pytest.mark.parametrize(("sizes", "kernel", "counts"), [((9,), (3,), (4,)), ((5, 4, 6), (3, 2, 3), (2, 4, 3))])
def test_other_ranks(target: Target, sizes: Any, kernel: Any, counts: Any) -> None:
    """One and three spatial axes, as in sound and video."""
    rank = len(sizes)
    pads = (0, 1, 1)[:rank] + (0, 0, 1)[:rank]
    window: Any = {"target": target, "threads": 2, "strides": (2, 1, 2)[:rank], "pads": pads}
    images, results = (3, *sizes, 18), (4, *counts, 18)
    run("FusedConv", images, (4, 3, *kernel), (4,), **window)
    run("ConvTranspose", results, (4, 3, *kernel), **window)
    run("ConvWeightGradient", images, results, kernel_shape=kernel, **window)
    run("MaxPoolGradient", images, (3, *counts, 18), kernel_shape=kernel, **window)


@each_target
def test_long_windows(target: Target) -> None:
    """Windows with more taps per line than there are registers."""
    shapes = ((2, 5, 20, 8), (3, 5, 14, 8))
    run("ConvWeightGradient", *shapes, target=target, kernel_shape=(1, 11), pads=(0, 3, 0, 1))


@each_target
@pytest.mark.parametrize(
    "window",
    [
        {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)},
        {"kernel_shape": (2, 3), "strides": (1, 2)},
        {"kernel_shape": (2, 2), "strides": (3, 2), "dilations": (2, 3), "pads": (0, 1, 1, 2)},
        {"kernel_shape": (3, 2), "strides": (2, 2), "auto_pad": "SAME_LOWER"},
    ],
    ids=str,
)
def test_gradient_of_pooling_with_overlaps(target: Target, window: Any) -> None:
    """Inputs are rounded, so that many windows have several maxima."""
    graph = single_node("MaxPool", tensor(3, 9, 8, 21), layout="CHWN", **window)
    shape = graph.outputs[0].tensor.evaluate({})
    node = NodeKernel("MaxPoolGradient", tensor(3, 9, 8, 21), tensor(*shape), target=target, layout="CHWN", **window)
    rounded = np.round(floats(3, 9, 8, 21) * 2).astype(np.float32)
    node.check(rounded, floats(*shape), threads=2, atol=1e-5)


@each_target
@pytest.mark.parametrize(
    ("layout", "kernel", "channels"), [("CHWN", (2, 2), 64), ("NHWC", (3, 2), 5), ("CHWN", (2, 4), 19)]
)
def test_pool_gradient(target: Target, layout: str, kernel: tuple[int, int], channels: int) -> None:
    """Also with lines and columns after the last window, and with several maxima in a window."""
    x, dy = tensor(3, 7, 8, channels), tensor(3, 7 // kernel[0], 8 // kernel[1], channels)
    window: Any = {"kernel_shape": kernel, "strides": kernel, "layout": layout}
    node = NodeKernel("MaxPoolGradient", x, dy, target=target, **window)
    rounded = np.round(floats(3, 7, 8, channels) * 2)
    node.check(rounded.astype(np.float32), floats(*dy.evaluate({})), threads=2)


@each_target
def test_epilogue(target: Target) -> None:
    """A bias, one number per channel, one number for all, and one for each result."""
    body = Graph("epilogue")
    writer = Writer(body)
    value, scale, shift, old = (writer.input(name, TensorType(F32, ())) for name in ("x", "scale", "shift", "old"))
    body.outputs = [((value * scale).op("Relu") + shift - old).value]
    shapes = ((2, 5, 6, 20), (7, 2, 3, 3), (7,), (7, 1, 1, 1), (1,), (7, 3, 4, 20))
    run("FusedConv", *shapes, target=target, epilogue=body)


@pytest.mark.parametrize(
    ("op", "shapes", "attrs"),
    [
        ("FusedConv", ((2, 5, 6, 20), (7, 2, 3, 3), (7,), (20,)), {}),
        ("ConvTranspose", ((2, 5, 6, 20), (2, 7, 3, 3)), {"strides": (2, 2), "dilations": (2, 1)}),
    ],
)
def test_unsupported_forms_run_on_the_reference(op: str, shapes: Any, attrs: dict[str, Any]) -> None:
    if len(shapes) == 4:
        body = Graph("epilogue")
        writer = Writer(body)
        value, extra = (writer.input(name, TensorType(F32, ())) for name in ("x", "extra"))
        body.outputs = [(value + extra).value]
        attrs = {**attrs, "epilogue": body}
    graph = single_node(op, *(tensor(*shape) for shape in shapes), layout="CHWN", **attrs)
    assert select(Request(graph.nodes[0], graph.constants, vectors())) is None
