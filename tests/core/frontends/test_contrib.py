"""Contributed operators (com.microsoft) against ONNX Runtime, which defines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lathe
from lathe.core.errors import UnsupportedError
from lathe.core.frontends.onnx import load
from tests.core.frontends.models import assert_agree, floats, model
from tests.onnx_runtime import SEVEN_BITS


def contributed(op: str, inputs: list[str], outputs: list[str], **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain="com.microsoft", **attrs)


def agree(
    node: onnx.NodeProto,
    feeds: Mapping[str, Any],
    constants: Mapping[str, Any],
    tolerance: float,
    symbols: bool = False,
) -> None:
    """Check a node against ONNX Runtime, for feeds of any type; with `symbols`, all their extents are symbols."""
    shapes = {k: [f"{k}{axis}" if symbols else size for axis, size in enumerate(v.shape)] for k, v in feeds.items()}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), shapes[k])
            for k, v in feeds.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
        [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    assert_agree(helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds, tolerance)


NODES = [
    contributed("Gelu", ["x"], ["y"]),
    contributed("BiasGelu", ["x", "a"], ["y"]),
    contributed("FastGelu", ["x", "a"], ["y"]),
    contributed("FastGelu", ["x"], ["y"]),
    contributed("QuickGelu", ["x"], ["y"], alpha=1.5),
    contributed("SkipLayerNormalization", ["x", "s", "a", "b"], ["y"], epsilon=1e-5),
    contributed("SkipLayerNormalization", ["x", "s", "a", "b", "c"], ["y", "", "", "z"]),
    contributed("SkipSimplifiedLayerNormalization", ["x", "s", "a", "b"], ["y", "", "", "z"], epsilon=1e-5),
    contributed("FusedMatMul", ["x", "s"], ["y"], transB=1, alpha=0.5),
    contributed("FusedMatMul", ["x", "s"], ["y"], transA=1),
]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.op_type)
def test_contributed_operators_agree_with_onnx_runtime(node: onnx.NodeProto) -> None:
    constants = {"s": floats(2, 3, 8, seed=1), **{name: floats(8, seed=i) for i, name in enumerate("abc", start=2)}}
    outputs = [name for name in node.output if name]
    proto = model([node], {"x": [2, 3, 8]}, outputs, constants=constants, domains={"com.microsoft": 1})
    assert_agree(proto, {"x": floats(2, 3, 8)}, 1e-4)


def test_unknown_contributed_operators_are_refused_by_name() -> None:
    node = contributed("CropAndResize", ["x"], ["y"])
    with pytest.raises(UnsupportedError, match=r"operator CropAndResize of domain 'com\.microsoft', opset 1 is not"):
        load(model([node], {"x": [1, 2, 2, 1]}, domains={"com.microsoft": 1}).SerializeToString())
    transposed = contributed("FusedMatMul", ["x", "c"], ["y"], transBatchA=1)
    constants = {"c": np.ones((2, 2, 2), np.float32)}
    with pytest.raises(UnsupportedError, match="transposes its batch axes"):
        load(
            model([transposed], {"x": [2, 2, 2]}, constants=constants, domains={"com.microsoft": 1}).SerializeToString()
        )


@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
@pytest.mark.parametrize("outputs", [["y", "mean"], ["y", "", "deviation"], ["y", "mean", "deviation", "z"]])
def test_statistics_for_training_are_refused(op: str, outputs: list[str]) -> None:
    """Lathe once returned the sum in their place."""
    node = contributed(op, ["x", "x", "a", "a"], outputs)
    constants = {"a": np.ones(4, np.float32)}
    with pytest.raises(UnsupportedError, match="returns its mean or deviation, which are for training"):
        load(model([node], {"x": [2, 3, 4]}, constants=constants, domains={"com.microsoft": 1}).SerializeToString())


IMAGES = {
    "x": floats(2, 3, 6, 6),
    "w": floats(4, 3, 3, 3, seed=1),
    "b": floats(4, seed=2),
    "z": floats(2, 4, 4, 4, seed=3),
}
SWAPPED = {"x": floats(2, 6, 6, 3)}
MATRICES = {"x": floats(3, 4), "w": floats(4, 5, seed=1), "b": floats(5, seed=2)}

LAYERS = [
    (contributed("FusedConv", ["x", "w", "b"], ["y"], activation="Relu"), IMAGES),
    (contributed("FusedConv", ["x", "w", "b", "z"], ["y"], activation="Relu"), IMAGES),
    (contributed("FusedConv", ["x", "w"], ["y"], activation="LeakyRelu", activation_params=[0.25]), IMAGES),
    (contributed("FusedConv", ["x", "w", "b"], ["y"], activation="Clip", activation_params=[-0.5, 0.75]), IMAGES),
    (contributed("FusedConv", ["x", "w"], ["y"], activation="HardSigmoid", activation_params=[0.3, 0.4]), IMAGES),
    (contributed("FusedGemm", ["x", "w", "b"], ["y"], activation="Sigmoid", alpha=0.5), MATRICES),
    (contributed("FusedGemm", ["x", "w", "b"], ["y"], activation="LeakyRelu", activation_alpha=0.2), MATRICES),
    (contributed("NhwcMaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2]), {"x": np.uint8(SWAPPED["x"] * 50)}),
    (contributed("ExpandDims", ["x", "a"], ["y"]), {**MATRICES, "a": np.int32(1)}),
]


@pytest.mark.parametrize(("node", "arrays"), LAYERS, ids=lambda value: getattr(value, "op_type", ""))
def test_layers(node: onnx.NodeProto, arrays: Mapping[str, Any]) -> None:
    used = {name: array for name, array in arrays.items() if name in node.input}
    x = used.pop("x")
    agree(node, {"x": x}, used, 1e-4)


def test_rms_norm_in_the_default_domain() -> None:
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], epsilon=1e-5, axis=-1)
    agree(node, {"x": floats(2, 3, 8)}, {"g": floats(8, seed=1)}, 1e-5)


def test_activations_are_named() -> None:
    node = contributed("FusedConv", ["x", "w"], ["y"], activation="Cube")
    with pytest.raises(UnsupportedError, match="activation is Cube, expected one of Clip, Elu"):
        load(
            model(
                [node], {"x": [1, 3, 6, 6]}, constants={"w": IMAGES["w"]}, domains={"com.microsoft": 1}
            ).SerializeToString()
        )


A, B, PLACE = np.uint8([[3, 200, 7], [90, 128, 255]]), np.uint8([[130, 1, 77], [250, 60, 4]]), np.uint8(128)
SCALES = {
    "sa": np.float32(0.02),
    "sb": np.float32(0.03),
    "sy": np.float32(0.05),
    "za": PLACE,
    "zb": np.uint8(120),
    "zy": np.uint8(9),
}
UNARY = ["a", "sa", "za", "sy", "zy"]
BINARY = ["a", "sa", "za", "b", "sb", "zb", "sy", "zy"]
PICTURE = np.random.default_rng(0).integers(0, 255, (2, 3, 6, 6)).astype(np.uint8)
WEIGHT = np.random.default_rng(1).integers(-SEVEN_BITS, SEVEN_BITS + 1, (3, 4)).astype(np.int8)

QUANTIZED = [
    (contributed("QLinearAdd", BINARY, ["y"]), {"a": A, "b": B}),
    (contributed("QLinearMul", BINARY, ["y"]), {"a": A, "b": B[0]}),
    (contributed("QLinearSigmoid", UNARY, ["y"]), {"a": A}),
    (contributed("QLinearLeakyRelu", UNARY, ["y"], alpha=0.2), {"a": A}),
    (contributed("QLinearSoftmax", UNARY, ["y"], axis=-1, opset=13), {"a": A}),
    (contributed("QLinearGlobalAveragePool", UNARY, ["y"]), {"a": PICTURE}),
    (contributed("QLinearGlobalAveragePool", UNARY, ["y"], channels_last=1), {"a": PICTURE}),
    (contributed("QLinearAveragePool", UNARY, ["y"], kernel_shape=[3, 3], pads=[1] * 4), {"a": PICTURE}),
    (contributed("QLinearConcat", ["sy", "zy", "a", "sa", "za", "b", "sb", "zb"], ["y"], axis=1), {"a": A, "b": B}),
    (
        contributed("QLinearWhere", ["c", "a", "sa", "za", "b", "sb", "zb", "sy", "zy"], ["y"]),
        {"c": A > 99, "a": A, "b": B},
    ),
    (contributed("QGemm", ["a", "sa", "za", "w", "sb", "zw", "k", "sy", "zy"], ["y"]), {"a": A}),
    (contributed("QGemm", ["a", "sa", "za", "w", "sb", "zw", "k"], ["y"]), {"a": A}),
    (contributed("QGemm", ["a", "sa", "za", "wt", "st", "zt", "k", "sy", "zy"], ["y"], transB=1, alpha=0.5), {"a": A}),
    (contributed("QuantizeLinear", ["f", "sy", "zy"], ["y"]), {"f": floats(3, 4) * 9}),
    (contributed("DequantizeLinear", ["a", "sa", "za"], ["y"]), {"a": A}),
]
PARTS = {
    **SCALES, "w": WEIGHT, "zw": np.int8(3), "k": np.int32([100, -200, 300, 5]), "wt": WEIGHT.T.copy(),
    "st": np.float32([0.01, 0.02, 0.03, 0.04]), "zt": np.zeros(4, np.int8),
}  # fmt: skip


@pytest.mark.parametrize(("node", "feeds"), QUANTIZED, ids=lambda value: getattr(value, "op_type", ""))
def test_quantized(node: onnx.NodeProto, feeds: Mapping[str, Any]) -> None:
    """Results may differ by one step of the output's scale: engines round halfway values differently."""
    agree(node, feeds, {name: PARTS[name] for name in node.input if name in PARTS}, 1.0)


@pytest.mark.parametrize("bias", [[], ["h"]])
def test_products_of_integers(bias: list[str]) -> None:
    parts = {**PARTS, "h": floats(4, seed=5)}
    for node, feeds in (
        (contributed("MatMulIntegerToFloat", ["a", "w", "sa", "sb", "za", "zw", *bias], ["y"]), {"a": A}),
        (contributed("DynamicQuantizeMatMul", ["f", "w", "sb", "zw", *bias], ["y"]), {"f": floats(2, 3)}),
    ):
        agree(node, feeds, {name: parts[name] for name in node.input if name in parts}, 1e-4)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("k", "block"), [(32, 16), (40, 32)])
def test_products_with_weights_of_four_bits(zero_points: bool, k: int, block: int) -> None:
    random, n = np.random.default_rng(2), 8
    blocks = -(-k // block)
    constants = {
        "w": random.integers(0, 256, (n, blocks, block // 2)).astype(np.uint8),
        "s": random.random((n, blocks)).astype(np.float32),
        "z": random.integers(0, 256, (n, -(-blocks // 2))).astype(np.uint8),
    }
    names = ["x", "w", "s", *(["z"] if zero_points else [])]
    node = contributed("MatMulNBits", names, ["y"], K=k, N=n, bits=4, block_size=block)
    agree(node, {"x": floats(3, k)}, {name: constants[name] for name in names[1:]}, 1e-3)


HIDDEN = {"w": floats(8, 24, seed=1) / 3, "b": floats(24, seed=2), "past": floats(2, 2, 2, 3, 4, seed=3)}
WORDS = {"x": floats(2, 5, 8)}
LENGTHS, MASK = np.int32([5, 2]), np.int32([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
CORNERS = np.tril(np.ones((2, 5, 5), np.int32))

ATTENTION = [
    contributed("Attention", ["x", "w", "b"], ["y"], num_heads=2),
    contributed("Attention", ["x", "w", "b"], ["y"], num_heads=2, scale=0.3, unidirectional=1),
    contributed("Attention", ["x", "w", "b", "lengths"], ["y"], num_heads=4),
    contributed("Attention", ["x", "w", "b", "mask"], ["y"], num_heads=2),
    contributed("Attention", ["x", "w", "b", "corners"], ["y"], num_heads=2),
    contributed("Attention", ["x", "w", "b", "", "past"], ["y", "present"], num_heads=2, unidirectional=1),
    contributed("Attention", ["x", "w", "b", "", "", "bias"], ["y"], num_heads=2),
    contributed("Attention", ["x", "w4", "b4"], ["y"], num_heads=2, qkv_hidden_sizes=[8, 8, 4]),
    contributed("MultiHeadAttention", ["x", "k", "v"], ["y"], num_heads=2),
    contributed("MultiHeadAttention", ["x", "k", "v", "b", "mask"], ["y"], num_heads=2),
    contributed("MultiHeadAttention", ["x", "k", "v", "", "", "bias"], ["y"], num_heads=2),
    contributed("MultiHeadAttention", ["x", "k4", "v4"], ["y"], num_heads=2),
]


@pytest.mark.parametrize("symbols", [False, True])
@pytest.mark.parametrize("node", ATTENTION, ids=lambda node: node.op_type)
def test_attention(node: onnx.NodeProto, symbols: bool) -> None:
    given = {
        **HIDDEN, "lengths": LENGTHS, "mask": MASK, "corners": CORNERS, "bias": floats(2, 2, 5, 5, seed=4),
        "k": floats(2, 5, 8, seed=5), "v": floats(2, 5, 8, seed=6), "k4": floats(2, 2, 7, 4, seed=5),
        "v4": floats(2, 2, 7, 4, seed=6), "w4": floats(8, 20, seed=7) / 3, "b4": floats(20, seed=8),
    }  # fmt: skip
    weights = {name: given[name] for name in node.input if name in {"w", "b", "w4", "b4"}}
    feeds = WORDS | {name: given[name] for name in node.input if name in given.keys() - weights.keys()}
    agree(node, feeds, weights, 1e-4, symbols)


def test_embeddings_with_layer_norm() -> None:
    tables = {
        "words": floats(9, 8),
        "places": floats(6, 8, seed=1),
        "kinds": floats(2, 8, seed=2),
        "g": floats(8),
        "b": floats(8),
    }
    ids = {
        "ids": np.int32([[1, 8, 3], [0, 2, 4]]),
        "kind": np.int32([[0, 1, 1], [0, 0, 1]]),
        "m": np.int32([[1, 1, 0]] * 2),
    }
    names = ["ids", "kind", "words", "places", "kinds", "g", "b", "m"]
    agree(contributed("EmbedLayerNormalization", names, ["y", "count", "sum"]), ids, tables, 1e-4)
    plain = ["ids", "", "words", "places", "", "g", "b"]
    kept = {name: table for name, table in tables.items() if name in plain}
    agree(contributed("EmbedLayerNormalization", plain, ["y", "count"]), {"ids": ids["ids"]}, kept, 1e-4)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 2, 3, 4)])
@pytest.mark.parametrize("places", [np.int64([2]), np.int64([[0, 1, 2], [4, 3, 5]])])
def test_rotary_positions(interleaved: int, shape: tuple[int, ...], places: Any) -> None:
    angles = np.random.default_rng(0).random((8, 2)).astype(np.float32) * 6
    node = contributed("RotaryEmbedding", ["x", "p", "c", "s"], ["y"], interleaved=interleaved)
    agree(node, {"x": floats(*shape), "p": places}, {"c": np.cos(angles), "s": np.sin(angles)}, 1e-4)


def test_packed_attention_is_refused() -> None:
    node = contributed("MultiHeadAttention", ["x"], ["y"], num_heads=2)
    with pytest.raises(UnsupportedError, match="in one tensor, expected three"):
        load(model([node], {"x": [1, 2, 2, 3, 4]}, domains={"com.microsoft": 1}).SerializeToString())


def by_bytes(weight: Any, of_columns: bool) -> tuple[Any, Any, Any]:
    """The bytes, scales and zero points of a weight [directions, gates, inputs], as ONNX Runtime quantizes it.

    With one scale per column bytes are signed, of 7 bits (see `SEVEN_BITS`), and zero points are 0."""
    columns = weight.transpose(0, 2, 1)
    if of_columns:
        scale = np.abs(columns).max(1, keepdims=True) / SEVEN_BITS
        data = np.round(columns / scale).astype(np.int8)
        return data, scale.squeeze(1).astype(np.float32), np.zeros_like(scale.squeeze(1), np.int8)
    axes = (1, 2)
    low, high = np.minimum(columns.min(axes, keepdims=True), 0), np.maximum(columns.max(axes, keepdims=True), 0)
    scale = (high - low) / 255
    zero = np.round(-low / scale)
    data = np.clip(np.round(columns / scale) + zero, 0, 255).astype(np.uint8)
    return data, scale.squeeze(axes).astype(np.float32), zero.squeeze(axes).astype(np.uint8)


@pytest.mark.parametrize("of_columns", [False, True])
@pytest.mark.parametrize(
    ("direction", "count", "inputs", "forget"),
    [("forward", 1, ["b", "", "h0", "c0"], 0), ("reverse", 1, ["b"], 0), ("bidirectional", 2, ["", "", "h0", "c0"], 1)],
)
def test_layers_of_quantized_weights(
    direction: str, count: int, inputs: list[str], forget: int, of_columns: bool
) -> None:
    hidden, constants = 6, {"b": floats(count, 48, seed=3)}
    for name, weight in {"w": floats(count, 24, 5, seed=1), "r": floats(count, 24, hidden, seed=2)}.items():
        data, scale, zero = by_bytes(weight, of_columns)
        constants |= {name: data, f"s{name}": scale, f"z{name}": zero}
    feeds = {"x": floats(4, 3, 5), "h0": floats(count, 3, hidden, seed=4), "c0": floats(count, 3, hidden, seed=5)}
    given = [*inputs, *[""] * (4 - len(inputs))]
    attrs = {"direction": direction, "hidden_size": hidden, "input_forget": forget}
    quantized = ["sw", "zw", "sr", "zr"]
    node = contributed("DynamicQuantizeLSTM", ["x", "w", "r", *given, "", *quantized], ["y", "h", "c"], **attrs)
    used = {name for name in node.input if name}
    shapes = {"x": [4, "n", 5], **{name: [count, "n", hidden] for name in ("h0", "c0") if name in used}}
    own = {name: array for name, array in constants.items() if name in used}
    proto = model([node], shapes, ["y", "h", "c"], constants=own, domains={"com.microsoft": 1})
    assert_agree(proto, {name: array for name, array in feeds.items() if name in used}, 1e-5)


def test_steps_of_a_quantized_layer_are_compiled() -> None:
    data, scale, zero = by_bytes(floats(1, 24, 6), True)
    constants = {"w": data, "s": scale, "z": zero}
    node = contributed("DynamicQuantizeLSTM", ["x", "w", "w", *[""] * 5, "s", "z", "s", "z"], ["y"], hidden_size=6)
    proto = model([node], {"x": [4, "n", 6]}, ["y"], constants=constants, domains={"com.microsoft": 1})
    with lathe.compile(proto.SerializeToString(), threads=1, tune="off") as session:
        session.run({"x": floats(4, 3, 6)})
        assert "FALLBACK" not in session.explain()


def test_weights_of_a_quantized_layer_stay_bytes() -> None:
    """Every step reads all weights of the state; as floats they would take four times the memory."""
    rng = np.random.default_rng(0)
    constants = {name: rng.integers(-99, 99, (1, 64, 256)).astype(np.int8) for name in "wr"}
    constants |= {"s": np.full(1, 0.01, np.float32), "z": np.zeros(1, np.int8)}
    node = contributed("DynamicQuantizeLSTM", ["x", "w", "r", *[""] * 5, "s", "z", "s", "z"], ["y"], hidden_size=64)
    proto = model([node], {"x": [4, "n", 64]}, ["y"], constants=constants, domains={"com.microsoft": 1})
    with lathe.compile(proto.SerializeToString(), threads=1, tune="off") as session:
        session.run({"x": floats(4, 3, 64)})
        assert session.memory is not None
        assert session.memory.weights < 1.5 * sum(constants[name].nbytes for name in "wr")


def test_unsupported_quantized_layers_are_refused() -> None:
    inputs = ["x", "x", "x", "", "x", "", "", "", "x", "x", "x", "x"]
    node = contributed("DynamicQuantizeLSTM", inputs, ["y"], hidden_size=6)
    with pytest.raises(UnsupportedError, match="has sequence lengths or peepholes, expected neither"):
        load(model([node], {"x": [1, 2, 6]}, domains={"com.microsoft": 1}).SerializeToString())
