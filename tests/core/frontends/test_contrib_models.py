"""Contributed operators of language models and of quantized ones, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lathe
from lathe.core.errors import UnsupportedError
from lathe.core.frontends.onnx import load
from tests.core.frontends.models import floats
from tests.core.frontends.test_contrib import contributed
from tests.onnx_runtime import SEVEN_BITS, plain_session

HEADS, SHARED, SIZE = 4, 2, 16


def proto_of(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, tuple[Any, list[Any]]], outputs: list[str], constants: Any
) -> bytes:
    """A model whose inputs have these types and shapes; its outputs declare no types."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)
         for name, (dtype, shape) in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [each if isinstance(each, TensorProto) else numpy_helper.from_array(np.asarray(each), name)
         for name, each in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def of_arrays(arrays: Mapping[str, Any]) -> dict[str, tuple[Any, list[Any]]]:
    return {name: (array.dtype, list(array.shape)) for name, array in arrays.items()}


# Attention


def attention(step: int, past: int, room: int, lengths: list[int], packed: bool = False, size: int = SIZE) -> Any:
    """Feeds of `step` new tokens for each row, and the angles of rotary embeddings.

    The past has `room` slots, of which the longest row has filled `past`.
    """
    batch = len(lengths)
    rows = {"q": floats(batch, step, HEADS * size), "k": floats(batch, step, SHARED * size, seed=1)}
    rows["v"] = floats(batch, step, SHARED * size, seed=2)
    if packed:
        rows = {"q": np.concatenate(list(rows.values()), axis=-1)}
    kept = {name: floats(batch, SHARED, room, size, seed=seed) for seed, name in enumerate(("pk", "pv"), start=3)}
    numbers = {"lengths": np.array(lengths, np.int32) - 1, "total": np.array(past + step, np.int32)}
    return rows | kept | numbers, angles(size // 2)


def angles(count: int) -> dict[str, Any]:
    turns = np.random.default_rng(4).random((32, count)).astype(np.float32) * 6
    return {"cos": np.cos(turns), "sin": np.sin(turns)}


def query(packed: bool = False, rotary: bool = True, **attrs: Any) -> onnx.NodeProto:
    names = ["q", *([""] * 2 if packed else ["k", "v"]), "pk", "pv", "lengths", "total"]
    names += ["cos", "sin"] if rotary else []
    attrs = {"num_heads": HEADS, "kv_num_heads": SHARED, "do_rotary": int(rotary), **attrs}
    return contributed("GroupQueryAttention", names, ["y", "k2", "v2"], **attrs)


def check_attention(node: onnx.NodeProto, feeds: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    """Compare with ONNX Runtime, except for cache slots after the last key, which are never read."""
    known = {name: each for name, each in constants.items() if name in node.input}
    data = proto_of([node], of_arrays(feeds), list(node.output), known)
    theirs = plain_session(data).run(None, dict(feeds))
    with lathe.compile(data, threads=1, tune="off") as session:
        both = session.run(feeds), lathe.interpret(lathe.load(data), feeds)
    for ours in both:
        np.testing.assert_allclose(ours["y"], theirs[0], 1e-4, 1e-4)
        for name, want in zip(("k2", "v2"), theirs[1:], strict=True):
            assert ours[name].shape == want.shape
            for row, length in enumerate(feeds["lengths"] + 1):
                np.testing.assert_allclose(ours[name][row, :, :length], want[row, :, :length], 1e-4, 1e-4)


STEPS = {
    "a prompt": (5, 0, 0, [5, 5]),
    "a step": (1, 6, 6, [7, 7]),
    "a step in a buffer": (1, 6, 12, [7, 7]),
    "rows of two lengths in a buffer": (1, 6, 12, [4, 7]),
    "several steps": (3, 6, 6, [9]),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("attrs", [{}, {"rotary_interleaved": 1}, {"packed": True}, {"rotary": False, "scale": 0.2}])
def test_grouped_queries(step: str, attrs: dict[str, Any]) -> None:
    feeds, turns = attention(*STEPS[step], packed=attrs.get("packed", False))
    check_attention(query(**attrs), feeds, turns)


@pytest.mark.parametrize("attrs", [{"local_window_size": 3}, {"softcap": 2.0}])
@pytest.mark.parametrize("step", ["a prompt", "a step", "a step in a buffer"])
@pytest.mark.sample(3)
def test_windows_and_soft_caps(step: str, attrs: dict[str, Any]) -> None:
    feeds, turns = attention(*STEPS[step])
    check_attention(query(**attrs), feeds, turns)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("step", ["a prompt", "a step", "a step in a buffer"])
@pytest.mark.sample(3)
def test_sinks_of_attention(step: str, sink: bool) -> None:
    """The softmax includes one further score: an input with a score for each head, or 0."""
    feeds, turns = attention(*STEPS[step])
    node = query(smooth_softmax=0 if sink else 1)
    node.input.extend(["", "", "sink"] if sink else [])
    check_attention(node, feeds, {**turns, "sink": floats(HEADS, seed=7)})


@pytest.mark.parametrize("attrs", [{}, {"qk_norm_epsilon": 0.1}, {"q_norm_epsilon": 0.1, "k_norm_epsilon": 0.01}])
def test_normalized_queries_and_keys(attrs: dict[str, Any]) -> None:
    """ONNX Runtime normalizes them only on GPUs: its CPU provider gets queries and keys that NumPy normalized."""
    feeds, turns = attention(*STEPS["a step"])
    scales = {"q": floats(SIZE, seed=8), "k": floats(SIZE, seed=9)}
    node = query(**attrs)
    node.input.extend([*[""] * 5, "qn", "kn"])
    data = proto_of([node], of_arrays(feeds), ["y"], {**turns, "qn": scales["q"], "kn": scales["k"]})
    normalized = dict(feeds)
    for name, scale in scales.items():
        epsilon = attrs.get(f"{name}_norm_epsilon", attrs.get("qk_norm_epsilon", 1e-6))
        heads = feeds[name].reshape(*feeds[name].shape[:2], -1, SIZE)
        spread = np.sqrt(np.mean(heads**2, -1, keepdims=True) + epsilon)
        normalized[name] = (heads / spread * scale).reshape(feeds[name].shape)
    want = plain_session(proto_of([query()], of_arrays(feeds), ["y"], turns)).run(None, normalized)[0]
    np.testing.assert_allclose(lathe.interpret(lathe.load(data), feeds)["y"], want, 1e-4, 1e-4)


@pytest.mark.parametrize("step", ["a prompt", "a step"])
def test_partial_rotary_embeddings(step: str) -> None:
    feeds, turns = attention(*STEPS[step], size=2 * SIZE)
    check_attention(query(), feeds, angles(SIZE // 2))
    assert turns["cos"].shape[1] == SIZE


def decoder() -> bytes:
    """One layer as ONNX Runtime GenAI writes it: the mask counts the keys."""
    weights = {name: floats(SIZE * HEADS, width, seed=seed) / 8
               for seed, (name, width) in enumerate({"wq": HEADS, "wk": SHARED, "wv": SHARED}.items())
               for width in [width * SIZE]}  # fmt: skip
    nodes = [
        *(helper.make_node("MatMul", ["x", f"w{each}"], [each]) for each in "qkv"),
        helper.make_node("ReduceSum", ["mask", "one"], ["sums"], keepdims=0),
        helper.make_node("Sub", ["sums", "one"], ["less"]),
        helper.make_node("Cast", ["less"], ["lengths"], to=TensorProto.INT32),
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["all"], axis=0),
        helper.make_node("Cast", ["all"], ["total"], to=TensorProto.INT32),
        query(),
    ]
    past = (np.dtype(np.float32), ["batch", SHARED, "past", SIZE])
    inputs = {
        "x": (np.dtype(np.float32), ["batch", "step", SIZE * HEADS]),
        "mask": (np.dtype(np.int64), ["batch", "total_length"]), "pk": past, "pv": past,
    }  # fmt: skip
    return proto_of(nodes, inputs, ["y", "k2", "v2"], {**weights, **angles(SIZE // 2), "one": np.array([1], np.int64)})


@pytest.mark.slow
def test_a_decoder_generates_step_by_step() -> None:
    """Every step runs compiled code: a prompt, then tokens after the cached keys and values."""
    data = decoder()
    theirs = plain_session(data)
    with lathe.compile(data, threads=1, tune="off", new_shapes="wait") as session:
        kept = [floats(2, SHARED, 0, SIZE)] * 2
        for count in (5, 1, 1):
            length = kept[0].shape[2] + count
            feeds = {"x": floats(2, count, SIZE * HEADS, seed=length), "mask": np.ones((2, length), np.int64),
                     "pk": kept[0], "pv": kept[1]}  # fmt: skip
            got, want = session.run(feeds), theirs.run(None, feeds)
            for ours, other in zip(got.values(), want, strict=True):
                np.testing.assert_allclose(ours, other, 1e-4, 1e-4)
            kept = want[1:]
        text = session.explain()
    assert "FALLBACK" not in text, text


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ({"kv_num_heads": 3}, "4 heads of queries for 3 of keys"),
        ({"causal": 0}, "attribute 'causal' = 0"),
        ({"sliding_window_cache": 1}, "attribute 'sliding_window_cache' = 1"),
    ],
)
def test_other_attention_is_refused(attrs: dict[str, Any], expected: str) -> None:
    feeds, turns = attention(*STEPS["a step"])
    with pytest.raises(UnsupportedError, match=expected):
        load(proto_of([query(**attrs)], of_arrays(feeds), ["y"], turns))


# Recurrence of bytes


@pytest.mark.sample(3)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_lstm_of_bytes(direction: str, columns: bool, dtype: Any) -> None:
    """In every form of scales and zero points. Signed weights have 7 bits: see `SEVEN_BITS`."""
    both, hidden, features = 1 + (direction == "bidirectional"), 6, 5
    rng, middle = np.random.default_rng(8), 0 if dtype == np.int8 else 128
    shapes = {"w": (both, features, 4 * hidden), "r": (both, hidden, 4 * hidden)}
    most = SEVEN_BITS if dtype == np.int8 else 99
    whole = {name: rng.integers(middle - most, middle + most, shape).astype(dtype) for name, shape in shapes.items()}
    wide = (both, 4 * hidden) if columns else (both,)
    scales = {name: rng.uniform(0.004, 0.008, wide).astype(np.float32) for name in shapes}
    zeros = {name: np.full(wide, middle, dtype) for name in shapes}
    feeds = {"x": floats(7, 3, features), "h": floats(both, 3, hidden, seed=1), "c": floats(both, 3, hidden, seed=2)}
    bias, outputs = floats(both, 8 * hidden, seed=3) / 4, ["y", "yh", "yc"]
    names = ["x", "w", "r", "b", "", "h", "c", "", "ws", "wz", "rs", "rz"]
    node = contributed("DynamicQuantizeLSTM", names, outputs, hidden_size=hidden, direction=direction)
    parts = {"b": bias, "ws": scales["w"], "rs": scales["r"], "wz": zeros["w"], "rz": zeros["r"]}
    data = proto_of([node], of_arrays(feeds), outputs, {**whole, **parts})
    expected = plain_session(data).run(None, feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        got = list(session.run(feeds).values())
        assert " 0 on the reference" in session.explain()
    for ours, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, other, 1e-4, 1e-5)


# Tables of few bits


def table_of(kind: str, *shape: int) -> tuple[Any, int]:
    """A tensor of random numbers, and the bits of each."""
    rng = np.random.default_rng(len(kind))
    if kind in ("bytes of two", "bytes"):
        bits = 4 if kind == "bytes of two" else 8
        size = (*shape[:-1], shape[-1] * bits // 8)
        return rng.integers(0, 256, size).astype(np.uint8), bits
    low, high, dtype = (-8, 8, TensorProto.INT4) if kind == "int4" else (0, 16, TensorProto.UINT4)
    return helper.make_tensor("", dtype, shape, rng.integers(low, high, shape).ravel().tolist()), 4


@pytest.mark.parametrize("kind", ["int4", "uint4", "bytes of two", "bytes"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("width", [64, 48])
@pytest.mark.sample(4)
def test_rows_of_few_bits(kind: str, zeros: bool, width: int) -> None:
    table, bits = table_of(kind, 9, width)
    blocks = -(-width // 32)
    constants: dict[str, Any] = {"t": table, "s": floats(9, blocks)}
    if zeros:
        constants["z"] = table_of(kind, 9, blocks + blocks % 2)[0] if bits == 4 else table_of(kind, 9, blocks)[0]
    check_rows(constants, (9, blocks), bits=bits, block_size=32)


def check_rows(constants: dict[str, Any], shape: tuple[int, ...], **attrs: Any) -> None:
    for name, each in constants.items():
        if isinstance(each, TensorProto):
            each.name = name
    names = ["t", "i", "s", *(["z"] if "z" in constants else [])]
    node = contributed("GatherBlockQuantized", names, ["y"], **attrs)
    feeds = {"i": np.array([[1, 0, -1], [3, 2, 1]], np.int64)}
    data = proto_of([node], {"i": (np.dtype(np.int64), ["n", 3])}, ["y"], constants)
    (want,) = plain_session(data).run(None, feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        np.testing.assert_allclose(session.run(feeds)["y"], want, 1e-6, 1e-6)
        assert " 0 on the reference" in session.explain()


def test_columns_of_few_bits() -> None:
    """The gather axis is the one after the axis of the blocks."""
    table, _ = table_of("int4", 32, 9)
    check_rows({"t": table, "s": floats(2, 9)}, (2, 9), bits=4, block_size=16, gather_axis=1, quantize_axis=0)


def test_rows_of_a_weight_that_a_product_has_in_another_shape() -> None:
    """ONNX Runtime GenAI stores the last product's weights once, for the embedding, too: [rows, blocks, bytes]."""
    rng = np.random.default_rng(4)
    table, scales = rng.integers(0, 256, (9, 2, 16)).astype(np.uint8), floats(9, 2)
    nodes = [
        helper.make_node("Reshape", ["t", "shape"], ["rows"]),
        contributed("GatherBlockQuantized", ["rows", "i", "s"], ["y"], bits=4, block_size=32),
    ]
    feeds = {"i": np.array([3, 8, 0], np.int64)}
    constants = {"t": table, "s": scales, "shape": np.array([9, 32])}
    data = proto_of(nodes, {"i": (np.dtype(np.int64), ["n"])}, ["y"], constants)
    (want,) = plain_session(data).run(None, feeds)
    np.testing.assert_allclose(lathe.interpret(load(data), feeds)["y"], want, 1e-6, 1e-6)


def test_tables_that_are_not_constant_are_refused() -> None:
    node = contributed("GatherBlockQuantized", ["t", "i", "s"], ["y"], bits=8, block_size=16)
    arrays = {"t": np.zeros((3, 16), np.uint8), "i": np.zeros(2, np.int64), "s": floats(3, 1)}
    with pytest.raises(UnsupportedError, match="needs a constant table"):
        load(proto_of([node], of_arrays(arrays), ["y"], {}))
