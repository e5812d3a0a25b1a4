"""Convolutions against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.nn.conv import conv_pads
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.reference import interpret
from tests.core.one_node import assert_like_onnx, assert_rows_apart, assert_symbolic_batch, lathe_run, make_node

CONV = {
    "plain": ((2, 3, 7, 8), (4, 3, 3, 3), {}),
    "1x1": ((2, 5, 4, 4), (6, 5, 1, 1), {}),
    "strided": ((1, 3, 9, 11), (4, 3, 3, 2), {"strides": [2, 3], "pads": [1, 0, 2, 1]}),
    "dilated": ((1, 2, 12, 12), (3, 2, 3, 3), {"dilations": [2, 3], "pads": [2, 2, 2, 2]}),
    "grouped": ((2, 6, 5, 5), (4, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "depthwise": ((2, 4, 6, 6), (4, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "depth multiplier": ((1, 3, 5, 5), (6, 1, 3, 3), {"group": 3}),
    "same upper": ((1, 2, 7, 8), (3, 2, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((1, 2, 7, 8), (3, 2, 2, 4), {"auto_pad": "SAME_LOWER", "strides": [1, 3]}),
    "valid": ((1, 2, 7, 7), (3, 2, 3, 3), {"auto_pad": "VALID", "kernel_shape": [3, 3]}),
    "one axis": ((2, 3, 10), (4, 3, 3), {"strides": [2], "pads": [1, 1]}),
    "three axes": ((1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 0]}),
}

TRANSPOSED = {
    "plain": ((2, 3, 4, 5), (3, 4, 3, 3), {}),
    "strided": ((1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 3], "pads": [1, 0, 1, 2]}),
    "output padding": ((1, 3, 4, 4), (3, 2, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    "dilated": ((1, 2, 4, 4), (2, 3, 2, 3), {"dilations": [2, 2]}),
    "grouped": ((2, 4, 3, 3), (4, 3, 2, 2), {"group": 2, "strides": [2, 2]}),
    "output shape": ((1, 2, 3, 3), (2, 2, 3, 3), {"strides": [3, 2], "output_shape": [10, 8]}),
    "same upper": ((1, 2, 3, 4), (2, 2, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "same lower": ((1, 2, 3, 4), (2, 2, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "one axis": ((1, 2, 5), (2, 3, 4), {"strides": [2]}),
}


def arrays(x: tuple[int, ...], w: tuple[int, ...], bias: int) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(np.float32) for shape in (x, w, (bias,))]


def bias_of(op: str, w: tuple[int, ...], attrs: dict[str, Any]) -> int:
    return w[0] if op == "Conv" else w[1] * int(attrs.get("group", 1))


CASES = [("Conv", name) for name in CONV] + [("ConvTranspose", name) for name in TRANSPOSED]


@pytest.mark.parametrize(("op", "name"), CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_agrees_with_onnx_runtime(op: str, name: str, with_bias: bool) -> None:
    x, w, attrs = (CONV if op == "Conv" else TRANSPOSED)[name]
    inputs = arrays(x, w, bias_of(op, w, attrs))
    assert_like_onnx(op, inputs if with_bias else inputs[:2], attrs)


@pytest.mark.parametrize(("op", "name"), CASES)
def test_channels_last_is_the_same_with_axes_moved(op: str, name: str) -> None:
    x, w, attrs = (CONV if op == "Conv" else TRANSPOSED)[name]
    inputs = arrays(x, w, bias_of(op, w, attrs))
    (first,) = lathe_run(op, inputs, attrs)
    moved = [np.moveaxis(inputs[0], 1, -1), *inputs[1:]]
    (last,) = lathe_run(op, moved, {**attrs, "layout": "NHWC"})
    np.testing.assert_allclose(np.moveaxis(last, -1, 1), first, 1e-6, 1e-6)


@pytest.mark.parametrize(("op", "name"), CASES)
def test_symbolic_batch(op: str, name: str) -> None:
    x, w, attrs = (CONV if op == "Conv" else TRANSPOSED)[name]
    assert_symbolic_batch(op, arrays(x, w, bias_of(op, w, attrs)), attrs)


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_rows_are_independent(op: str) -> None:
    assert_rows_apart(op, arrays((3, 4, 5, 5), (4, 4, 3, 3), 4), {"pads": [1, 1, 1, 1]})


def test_weights_that_differ_by_row_mix() -> None:
    node = make_node("Conv", arrays((3, 4, 5, 5), (4, 4, 3, 3), 4), {})
    op = registry.get("Conv")
    assert isinstance(op.rows(registry.Infer(op, node, {}), [0, 0, None]), registry.MixesRows)


def test_half_precision_sums_in_single() -> None:
    x, w, _ = arrays((1, 64, 8, 8), (4, 64, 3, 3), 4)
    half = [x.astype(np.float16), w.astype(np.float16)]
    (y,) = lathe_run("Conv", half, {})
    (wide,) = lathe_run("Conv", [array.astype(np.float32) for array in half], {})
    np.testing.assert_array_equal(y, wide.astype(np.float16))


@pytest.mark.parametrize(
    ("x", "w", "bias", "attrs", "message"),
    [
        ((1, 3, 5, 5), (4, 2, 3, 3), 4, {}, "X has 3 channels, W expects 2"),
        ((1, 3, 5, 5), (4, 3, 3, 3), 5, {}, "expected \\[4\\]"),
        ((1, 3, 5, 5), (4, 3, 3), 4, {}, "W has rank 3, expected rank 4"),
        ((1, 3, 5, 5), (4, 3, 3, 3), 4, {"strides": [0, 1]}, "strides is \\[0, 1\\]"),
        ((1, 3, 5, 5), (4, 3, 3, 3), 4, {"pads": [1, 1]}, "pads are \\[1, 1\\], expected 4"),
        ((1, 3, 5, 5), (4, 3, 7, 3), 4, {}, "larger than spatial axis 0"),
        ((1, 3, 5, 5), (4, 3, 3, 3), 4, {"group": 0}, "group is 0"),
        ((1, 4, 5, 5), (3, 2, 3, 3), 3, {"group": 2}, "3 output channels, not divisible by group 2"),
        ((1, 3, 5, 5), (4, 3, 3, 3), 4, {"kernel_shape": [3, 2]}, "kernel_shape is \\[3, 2\\]"),
        ((1, 3, 5, 5), (4, 3, 3, 3), 4, {"auto_pad": "SAME"}, "auto_pad is 'SAME'"),
        ((1, 3, 5, 5), (4, 3, 3, 3), 4, {"layout": "HWCN"}, "layout is 'HWCN'"),
    ],
)
def test_invalid_shapes_are_refused(x: Any, w: Any, bias: int, attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        lathe_run("Conv", arrays(x, w, bias), attrs)
    assert caught.value.where == "node 'conv' (Conv)"


def test_symbolic_image_size() -> None:
    h, w = symbol("H"), symbol("W")
    node = Node("Conv", [], [Value("y", TensorType(DType.FLOAT32, None))], {"strides": (2, 2), "pads": (1, 1, 1, 1)})
    shapes = [(1, 3, h, w), (8, 3, 3, 3)]
    node.inputs = [Value(f"v{i}", TensorType(DType.FLOAT32, shape)) for i, shape in enumerate(shapes)]
    infer_node(node, {})
    assert node.output.tensor.evaluate({"H": 224, "W": 31}) == (1, 8, 112, 16)


def test_conv_pads_resolves_auto_pad() -> None:
    node = make_node("Conv", arrays((1, 2, 7, 8), (3, 2, 3, 4), 3)[:2], {"auto_pad": "SAME_UPPER", "strides": (2, 2)})
    op = registry.get("Conv")
    assert conv_pads(registry.Infer(op, node, {})) == ((1, 1), (1, 1))
    assert node.inputs[0] is not None
    node.inputs[0].type = TensorType(DType.FLOAT32, (1, 2, symbol("H"), 8))
    assert conv_pads(registry.Infer(op, node, {})) is None


def fused_model() -> tuple[Graph, list[Any]]:
    """relu(conv(x, w) + b + residual), channels last."""
    body = Graph("body")
    b = Builder(body)
    y, r = (b.input(name, TensorType(DType.FLOAT32, ())) for name in "yr")
    body.outputs = [b("Relu", b("Add", y, r))]
    graph = Graph("g")
    g = Builder(graph)
    x = g.input("x", TensorType(DType.FLOAT32, (symbol("n"), 5, 5, 3)))
    residual = g.input("residual", TensorType(DType.FLOAT32, (symbol("n"), 5, 5, 4)))
    x_data, w, bias = arrays((2, 5, 5, 3), (4, 3, 3, 3), 4)
    pads = (1, 1, 1, 1)
    out = g("FusedConv", x, g.constant(w), g.constant(bias), residual, pads=pads, layout="NHWC", epilogue=body)
    graph.outputs = [out]
    return graph, [x_data, w, bias, np.random.default_rng(1).standard_normal((2, 5, 5, 4)).astype(np.float32)]


def test_fused_conv_runs_its_epilogue() -> None:
    graph, (x, w, bias, residual) = fused_model()
    (y,) = lathe_run("Conv", [np.moveaxis(x, -1, 1), w, bias], {"pads": (1, 1, 1, 1)})
    (fused,) = interpret(graph, {"x": x, "residual": residual}).values()
    np.testing.assert_allclose(fused, np.maximum(np.moveaxis(y, 1, -1) + residual, 0), 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [(0, [0]), (None, registry.MixesRows("the rows of extra input 3 do not match those of the result"))],
)
def test_fused_conv_rows(extra: int | None, expected: object) -> None:
    graph, _ = fused_model()
    op = registry.get("FusedConv")
    assert op.rows(registry.Infer(op, graph.nodes[0], {}), [0, None, None, extra]) == expected
