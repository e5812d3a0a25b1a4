"""Contributed operators with random shapes and attributes, by the reference and compiled, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.random import Generator
from onnx import helper

import lathe
from lathe.core.errors import FeedError, UnsupportedError
from tests.core.frontends.models import floats
from tests.core.frontends.test_contrib import contributed
from tests.onnx_runtime import SEVEN_BITS, plain_session

Case = tuple[onnx.NodeProto, Mapping[str, Any], Mapping[str, Any]]  # a node, its feeds, its constants


def proto_of(
    node: onnx.NodeProto, feeds: Mapping[str, Any], constants: Mapping[str, Any], open_: bool, opset: int = 21
) -> bytes:
    """A model of one node; with `open_`, the leading extents of its inputs are symbols."""
    shapes = {k: [f"{k}_0", *v.shape[1:]] if open_ and v.ndim else v.shape for k, v in feeds.items()}
    infos = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), shapes[k]) for k, v in feeds.items()
    ]
    known = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", infos, outputs, known)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def check(case: Case, tolerance: float = 1e-4, opset: int = 21) -> None:
    """Reference operators and compiled code agree with ONNX Runtime, for known and for dynamic extents."""
    node, feeds, constants = case
    for open_ in (False, True):
        data = proto_of(node, feeds, constants, open_, opset)
        want = plain_session(data).run(None, dict(feeds))
        with lathe.compile(data, threads=1, tune="off", new_shapes="wait") as session:
            both = session.run(feeds), lathe.interpret(lathe.load(data), feeds)
        for ours in both:
            for mine, theirs in zip(ours.values(), want, strict=True):
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
                if mine.dtype.kind in "OU":
                    assert mine.tolist() == theirs.tolist()
                else:
                    np.testing.assert_allclose(mine, theirs, tolerance, tolerance)


def some(random: Generator, *shape: int) -> Any:
    return random.standard_normal(shape).astype(np.float32)


def extents(random: Generator, rank: int, least: int = 2, most: int = 7) -> tuple[int, ...]:
    return tuple(int(size) for size in random.integers(least, most, rank))


# Operators that ONNX has, too


def trilu(random: Generator) -> Case:
    attrs = {"upper": int(random.integers(2))}
    if random.random() < 0.5:
        return contributed("Trilu", ["x"], ["y"], **attrs), {"x": some(random, *extents(random, 3))}, {}
    node = contributed("Trilu", ["x", "k"], ["y"], **attrs)
    return node, {"x": some(random, *extents(random, 4))}, {"k": np.int64(random.integers(-3, 4))}


def grid_sample(random: Generator) -> Case:
    batch, height, width = extents(random, 3)
    attrs = {
        "mode": str(random.choice(["bilinear", "nearest", "bicubic"])),
        "padding_mode": str(random.choice(["zeros", "border", "reflection"])),
        "align_corners": int(random.integers(2)),
    }
    feeds = {"x": some(random, batch, 3, height, width), "g": some(random, batch, 4, 5, 2)}
    return contributed("GridSample", ["x", "g"], ["y"], **attrs), feeds, {}


def gather_nd(random: Generator) -> Case:
    x = some(random, *extents(random, 3))
    kind = np.int32 if random.random() < 0.5 else np.int64
    places = np.stack([random.integers(0, size, (2, 3)) for size in x.shape[: random.integers(1, 4)]], -1).astype(kind)
    return contributed("GatherND", ["x", "i"], ["y"]), {"x": x, "i": places}, {}


def pad(random: Generator) -> Case:
    mode = str(random.choice(["constant", "edge", "reflect"]))
    pads = random.integers(-1 if mode == "constant" else 0, 2, (1, 6))
    constants = {"p": pads if random.random() < 0.5 else pads[0], "v": np.float32([2.5])}
    names = ["x", "p", "v"] if mode == "constant" and random.random() < 0.7 else ["x", "p"]
    used = {name: constants[name] for name in names[1:]}
    return contributed("Pad", names, ["y"], mode=mode), {"x": some(random, *extents(random, 3, 3))}, used


def range_(random: Generator) -> Case:
    kind = [np.int32, np.int64, np.float32][random.integers(3)]
    shape = (1,) if random.random() < 0.5 else ()
    constants = {"a": np.full(shape, random.integers(3), kind), "b": np.full(shape, random.integers(4, 9), kind)}
    if random.random() < 0.5:
        constants["c"] = np.full(shape, 2, kind)
    return contributed("Range", list(constants), ["y"]), {"x": some(random, 2)}, constants


def unique(random: Generator) -> Case:
    x = random.integers(0, 5, random.integers(1, 20)).astype(np.float32)
    return contributed("Unique", ["x"], ["y", "i", "c"]), {"x": x}, {}


def transposed_conv(random: Generator) -> Case:
    channels, per_group, height, width = extents(random, 4, 2, 6)
    kernel, group, stride = int(random.integers(2, 4)), int(random.integers(1, 3)), int(random.integers(1, 3))
    parts = {
        "w": some(random, channels * group, per_group, kernel, kernel),
        "p": random.integers(0, 2, 4),
        "b": some(random, per_group * group),
    }
    feeds = {"x": some(random, 2, channels * group, height, width)}
    fed = "p" if random.random() < 0.5 else ""
    names = ["x", "w", "p", "b"] if random.random() < 0.5 else ["x", "w", "p"]
    attrs = {"group": group, "strides": [stride] * 2, "output_padding": [int(random.integers(stride))] * 2}
    constants = {name: parts[name] for name in names[1:] if name != fed}
    node = contributed("ConvTransposeWithDynamicPads", names, ["y"], **attrs)
    return node, {**feeds, **{name: parts[name] for name in [fed] if name}}, constants


def product_of_shorts(random: Generator) -> Case:
    rows, inner, columns = extents(random, 3)
    a, b = (random.integers(-999, 999, shape).astype(np.int16) for shape in ((2, rows, inner), (inner, columns)))
    return contributed("MatMulInteger16", ["a", "b"], ["y"]), {"a": a, "b": b}, {}


def distances(random: Generator) -> Case:
    left, right, size = extents(random, 3)
    metric = str(random.choice(["euclidean", "sqeuclidean"]))
    feeds = {"a": some(random, left, size), "b": some(random, right, size)}
    return contributed("CDist", ["a", "b"], ["y"], metric=metric), feeds, {}


def unfolded(random: Generator) -> Case:
    x = some(random, *extents(random, 3, 4))
    attrs = {"size": int(random.integers(1, 5)), "step": int(random.integers(1, 4)), "dim": int(random.integers(-3, 3))}
    return contributed("UnfoldTensor", ["x"], ["y"], **attrs), {"x": x}, {}


def inverse(random: Generator) -> Case:
    size = int(random.integers(1, 6))
    x = some(random, 2, 3, size, size) + 4 * np.eye(size, dtype=np.float32)
    return contributed("Inverse", ["x"], ["y"]), {"x": x}, {}


def hashed(random: Generator) -> Case:
    kind = random.choice(["i4", "u4", "i8", "u8", "f4", "f8", "O"])
    x = random.integers(0, 1 << 30, (3, 4)).astype(kind)
    if kind == "O":
        x = np.array(["", "a", "ab", "abc", "abcd", "größer", "a longer text", "12345678"], object).reshape(2, 4)
    attrs = {"positive": int(random.integers(2)), "seed": int(random.integers(1 << 20))}
    return contributed("MurmurHash3", ["x"], ["y"], **attrs), {"x": x}, {}


SAME = [
    trilu, grid_sample, gather_nd, pad, range_, unique, transposed_conv, product_of_shorts, distances, unfolded,
    inverse, hashed,
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draw", SAME, ids=lambda draw: draw.__name__)
def test_contributed_forms_of_onnx_operators(draw: Callable[[Generator], Case], seed: int) -> None:
    check(draw(np.random.default_rng(seed)))


def test_matrices_without_an_inverse_are_refused() -> None:
    data = proto_of(contributed("Inverse", ["x"], ["y"]), {"x": floats(2, 2)}, {}, open_=False)
    with lathe.compile(data, threads=1, tune="off") as session, pytest.raises(FeedError, match="without an inverse"):
        session.run({"x": np.ones((2, 2), np.float32)})


LEGACY = [
    helper.make_node("Affine", ["x"], ["y"], alpha=1.5, beta=-0.5),
    helper.make_node("ScaledTanh", ["x"], ["y"], alpha=1.5, beta=0.5),
    helper.make_node("ParametricSoftplus", ["x"], ["y"], alpha=1.5, beta=0.5),
    helper.make_node("Scale", ["x"], ["y"], scale=2.5),
    helper.make_node("ImageScaler", ["x"], ["y"], scale=2.5, bias=[0.5, -1.0, 2.0]),
    helper.make_node("Crop", ["x"], ["y"], border=[1, 2, 0, 1]),
    helper.make_node("Crop", ["x"], ["y"], border=[1, 2, 0, 0], scale=[3, 2]),
    helper.make_node("DynamicSlice", ["x", "a", "b", "c"], ["y"]),
]


@pytest.mark.parametrize("node", LEGACY, ids=lambda node: node.op_type)
def test_experimental_operators_of_old_files(node: onnx.NodeProto) -> None:
    bounds = {"a": np.int64([1, 0]), "b": np.int64([9, 3]), "c": np.int64([2, 3])}
    check((node, {"x": floats(2, 3, 6, 5)}, {name: bounds[name] for name in node.input[1:]}), opset=9)


# Numbers of few bits


def by_scale(random: Generator, *shape: int, kind: Any = np.int8) -> tuple[Any, Any, Any]:
    """Random bytes, and a scale and a zero point for them."""
    info = np.iinfo(kind)
    low, high = (-SEVEN_BITS, SEVEN_BITS) if kind is np.int8 else (info.min, info.max)
    return random.integers(low, high, shape).astype(kind), np.float32(0.02), kind(random.integers(0, 9))


@pytest.mark.sample(3)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"unidirectional": 1}, {"scale": 0.3}, {"mask_filter_value": -99.0}])
@pytest.mark.parametrize("mask", [None, [5, 2], [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]])
def test_quantized_attention(attrs: Mapping[str, Any], columns: bool, mask: Any) -> None:
    random = np.random.default_rng(3)
    x, xs, xz = by_scale(random, 2, 5, 8, kind=np.uint8)
    w, ws, wz = by_scale(random, 8, 24)
    parts = {"w": w, "b": some(random, 24), "xs": xs, "ws": ws, "xz": xz, "wz": wz}
    if columns:
        parts |= {"ws": (random.random(24) / 50).astype(np.float32), "wz": np.zeros(24, np.int8)}
    if mask is not None:
        parts["m"] = np.int32(mask)
    names = ["x", "w", "b", "xs", "ws", "" if mask is None else "m", "xz", "wz"]
    check((contributed("QAttention", names, ["y"], num_heads=2, **attrs), {"x": x}, parts))


def test_quantized_attention_goes_on() -> None:
    random = np.random.default_rng(4)
    x, xs, xz = by_scale(random, 2, 3, 8, kind=np.uint8)
    w, ws, wz = by_scale(random, 8, 24)
    parts = {"w": w, "b": some(random, 24), "xs": xs, "ws": ws, "xz": xz, "wz": wz}
    node = contributed("QAttention", ["x", "w", "b", "xs", "ws", "", "xz", "wz", "past"], ["y", "now"],
                       num_heads=2, unidirectional=1)  # fmt: skip
    feeds = {"x": x, "past": some(random, 2, 2, 2, 4, 4)}
    data = proto_of(node, feeds, parts, open_=False)
    want = plain_session(data).run(None, feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        for mine, theirs in zip(session.run(feeds).values(), want, strict=True):
            np.testing.assert_allclose(mine, theirs, 1e-4, 1e-4)


@pytest.mark.parametrize("segments", [False, True])
def test_embeddings_of_bytes(segments: bool) -> None:
    random = np.random.default_rng(5)
    tables = {"words": (11, 8), "places": (6, 8), "kinds": (2, 8), "gamma": (8,), "beta": (8,)}
    used = [name for name in tables if segments or name != "kinds"]
    parts: dict[str, Any] = {}
    for name in used:
        numbers, scale, zero = by_scale(random, *tables[name], kind=np.uint8)
        parts |= {name: numbers, f"{name}_s": scale, f"{name}_z": zero}
    listed = [name if name in used else "" for name in tables]
    scales, zeros = ([name and name + end for name in listed] for end in ("_s", "_z"))
    names = ["ids", "of" if segments else "", *listed, "mask", *scales, *zeros]
    feeds = {"ids": random.integers(0, 11, (2, 5)).astype(np.int32), "mask": np.ones((2, 5), np.int32)}
    if segments:
        feeds["of"] = random.integers(0, 2, (2, 5)).astype(np.int32)
    data = proto_of(contributed("QEmbedLayerNormalization", names, ["y", "n"]), feeds, parts, open_=False)
    want = plain_session(data).run(None, feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        for mine, theirs in zip(session.run(feeds).values(), want, strict=True):
            np.testing.assert_allclose(mine, theirs, 1e-4, 1e-4)


@pytest.mark.parametrize("last", [0, 1])
def test_quantized_convolution_with_channels_last(last: int) -> None:
    random = np.random.default_rng(6)
    x, xs, xz = by_scale(random, 2, 3, 6, 6, kind=np.uint8)
    w, ws, wz = by_scale(random, 4, 3, 3, 3)
    parts = {"xs": xs, "xz": xz, "w": w, "ws": ws, "wz": wz, "ys": np.float32(0.5), "yz": np.uint8(99)}
    x = np.moveaxis(x, 1, -1).copy() if last else x
    node = contributed("QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"], channels_last=last,
                       pads=[1, 0, 1, 1], strides=[2, 1])  # fmt: skip
    check((node, {"x": x}, parts), 1.0)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("shape", [(32, 8), (48, 3)])
def test_weights_of_bits_and_bytes(kind: int, block: int, shape: tuple[int, int]) -> None:
    random, (k, n) = np.random.default_rng(7), shape
    parts = {
        "w": random.integers(0, 256, (n * k + 1) // 2).astype(np.uint8),
        "most": random.random(-(-n * k // block)).astype(np.float32),
    }
    node = contributed("MatMulBnb4", ["x", "w", "most"], ["y"], K=k, N=n, block_size=block, quant_type=kind)
    check((node, {"x": some(random, 3, k)}, parts))


# Mixtures of experts

TOKENS, SIZE, INSIDE, EXPERTS = 5, 32, 32, 4


def layers(random: Generator, doubled: bool = False, bias: bool = True) -> dict[str, Any]:
    rows = 2 * INSIDE if doubled else INSIDE
    parts = {"w1": some(random, EXPERTS, rows, SIZE) / 5, "b1": some(random, EXPERTS, rows),
             "w2": some(random, EXPERTS, SIZE, INSIDE) / 5, "b2": some(random, EXPERTS, SIZE)}  # fmt: skip
    return parts if bias else {name: part for name, part in parts.items() if name[0] == "w"}


def routed(random: Generator, *leading: int) -> dict[str, Any]:
    return {"x": some(random, *leading, SIZE), "r": some(random, int(np.prod(leading)), EXPERTS)}


def mixture(names: Sequence[str], **attrs: Any) -> onnx.NodeProto:
    return contributed("MoE", ["x", "r", *names], ["y"], **attrs)


@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.sample(4)
def test_mixtures_of_experts(normalized: int, kind: str, k: int) -> None:
    random = np.random.default_rng(8)
    parts = layers(random, bias=k == 3)
    names = ["w1", "b1" if k == 3 else "", "w2", "b2" if k == 3 else ""]
    node = mixture(names, k=k, activation_type=kind, normalize_routing_weights=normalized)
    check((node, routed(random, TOKENS), parts))


@pytest.mark.parametrize("limit", [None, 0.5])
def test_gated_mixtures_of_experts(limit: float | None) -> None:
    """ONNX Runtime's CPU provider takes gates and values interleaved only: the other layouts must give the same."""
    random = np.random.default_rng(9)
    parts, feeds = layers(random, doubled=True), routed(random, TOKENS)
    attrs = {"k": 2, "activation_type": "swiglu", "activation_alpha": 1.7, "activation_beta": 1.0}
    attrs |= {} if limit is None else {"swiglu_limit": limit}
    names = ["w1", "b1", "w2", "b2"]
    node = mixture(names, swiglu_fusion=1, **attrs)
    check((node, feeds, parts))
    (want,) = plain_session(proto_of(node, feeds, parts, open_=False)).run(None, feeds)
    halves = {name: (parts[name][:, ::2].copy(), parts[name][:, 1::2].copy()) for name in ("w1", "b1")}
    beside = {**parts, **{name: np.concatenate(pair, 1) for name, pair in halves.items()}}
    apart = {**parts, **{name: pair[0] for name, pair in halves.items()}, "w3": halves["w1"][1], "b3": halves["b1"][1]}
    for other, constants in (
        (mixture(names, swiglu_fusion=2, **attrs), beside),
        (mixture([*names, "w3", "b3"], **attrs), apart),
    ):
        got = lathe.interpret(lathe.load(proto_of(other, feeds, constants, open_=False)), feeds)
        np.testing.assert_allclose(got["y"], want, 1e-4, 1e-4)


def test_experts_that_are_not_selected_have_no_influence() -> None:
    """An expert that overflows must not reach the tokens of others."""
    random = np.random.default_rng(10)
    parts, feeds = layers(random), routed(random, TOKENS)
    feeds["r"][:, 0] = -50.0
    parts["b1"][0] = np.inf
    check((mixture(list(parts), k=2), feeds, parts))


def test_mixtures_over_sentences() -> None:
    random = np.random.default_rng(11)
    check((mixture(["w1", "b1", "w2", "b2"], k=2), routed(random, 2, 3), layers(random)))


@pytest.mark.sample(5)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", ["silu", "swiglu"])
def test_mixtures_of_quantized_experts(bits: int, block: int | None, zeros: bool, kind: str) -> None:
    random = np.random.default_rng(12)
    rows = {"1": 2 * INSIDE if kind == "swiglu" else INSIDE, "2": SIZE}
    parts: dict[str, Any] = {}
    for name, count in rows.items():
        blocks = (SIZE // block,) if block else ()
        scale = random.random((EXPERTS, count, *blocks)).astype(np.float32) / (1 << bits)
        parts[f"w{name}"] = random.integers(0, 256, (EXPERTS, count, SIZE * bits // 8)).astype(np.uint8)
        parts |= {f"s{name}": scale, f"b{name}": some(random, EXPERTS, count)}
        packed = (EXPERTS, count, blocks[0] * bits // 8) if block else (EXPERTS, count * bits // 8)
        if zeros:
            parts[f"z{name}"] = random.integers(0, 256, packed).astype(np.uint8)
    names = ["w1", "s1", "b1", "w2", "s2", "b2", "", "", "", *(["z1", "z2"] if zeros else [])]
    attrs: dict[str, Any] = {"k": 2, "activation_type": kind, "expert_weight_bits": bits, "weights_prepacked": 0}
    attrs |= {"block_size": block} if block else {}
    attrs |= {"swiglu_fusion": 1} if kind == "swiglu" else {}
    node = contributed("QMoE", ["x", "r", *names], ["y"], normalize_routing_weights=1, **attrs)
    check((node, routed(random, TOKENS), parts), 0.05 if bits == 8 and block else 1e-3)


@pytest.mark.parametrize("normalized", [0, 1])
def test_weights_of_experts_that_the_router_does_not_give(normalized: int) -> None:
    random = np.random.default_rng(13)
    parts = {f"w{i}": random.integers(0, 256, (EXPERTS, SIZE, SIZE // 2)).astype(np.uint8) for i in (1, 2)}
    parts |= {f"s{i}": random.random((EXPERTS, SIZE)).astype(np.float32) / 16 for i in (1, 2)}
    feeds = {**routed(random, TOKENS), "shares": random.random((TOKENS, EXPERTS)).astype(np.float32)}
    names = ["x", "r", "w1", "s1", "", "w2", "s2", *[""] * 7, "shares"]
    node = contributed("QMoE", names, ["y"], k=2, normalize_routing_weights=normalized, weights_prepacked=0)
    data = proto_of(node, feeds, parts, open_=False)
    (want,) = plain_session(data).run(None, feeds)
    np.testing.assert_allclose(lathe.interpret(lathe.load(data), feeds)["y"], want, 1e-3, 1e-3)


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ({"use_sparse_mixer": 1}, "use_sparse_mixer"),
        ({"activation_type": "geglu"}, "activation_type is 'geglu', expected relu, gelu"),
        ({"activation_type": "swiglu"}, "swiglu_fusion is 0 without a third layer"),
    ],
)
def test_other_mixtures_are_refused(attrs: dict[str, Any], expected: str) -> None:
    random = np.random.default_rng(14)
    data = proto_of(mixture(["w1", "b1", "w2", "b2"], **attrs), routed(random, TOKENS), layers(random), open_=False)
    with pytest.raises(UnsupportedError, match=expected):
        lathe.load(data)


# Newer decoders


def gated_norm(random: Generator) -> Case:
    kind = str(random.choice(["silu", "swish", "sigmoid"]))
    feeds = {"x": some(random, 2, 3, 16), "g": some(random, 2, 3, 16)}
    return contributed("GatedRMSNorm", ["x", "s", "g"], ["y"], activation=kind), feeds, {"s": some(random, 8)}


def norm_of_branches(random: Generator) -> Case:
    flat = bool(random.integers(2))
    x = some(random, 3, 2, 4) if not flat else some(random, 3, 8)
    shape = [(8,), (2, 4), (4,)][random.integers(3)]
    attrs = {"num_branches": 2} if flat else {}
    return contributed("BranchwiseRMSNorm", ["x", "s"], ["y"], **attrs), {"x": x}, {"s": some(random, *shape)}


def gated_add(random: Generator) -> Case:
    feeds = {"x": some(random, 2, 3, 8), "z": some(random, 2, 3, 8), "g": some(random, 2, 3, 1)}
    return contributed("GatedAdd", ["x", "z", "g"], ["y"]), feeds, {}


def scaled_silu(random: Generator) -> Case:
    if random.random() < 0.5:
        return contributed("ScaledSiLU", ["x"], ["y"], alpha=1.5), {"x": some(random, 2, 8)}, {}
    return contributed("ScaledSiLU", ["x", "s"], ["y"]), {"x": some(random, 2, 8)}, {"s": np.float32(0.7)}


def decay_and_rate(random: Generator) -> Case:
    outputs = ["d", "r"][: random.integers(1, 3)]
    feeds = {name: some(random, 2, 3, 4) for name in ["a", "b"][: len(outputs)]}
    parts = {"t": some(random, 4), "s": some(random, 4)}
    return contributed("LinearAttentionGate", ["a", "t", "s", "b"][: 2 + len(outputs)], outputs), feeds, parts


def linear_attention(random: Generator) -> Case:
    rule = str(random.choice(["linear", "gated", "delta", "gated_delta"]))
    heads, size = 2, 4
    feeds = {name: some(random, 2, 3, heads * size) / 2 for name in "qkv"}
    feeds["past"] = some(random, 2, heads, size, size)
    feeds |= {"decay": -abs(some(random, 2, 3, heads))} if "gated" in rule else {}
    feeds |= {"beta": abs(some(random, 2, 3, heads)) / 4} if "delta" in rule else {}
    names = [*"qkv", "past", *(name if name in feeds else "" for name in ("decay", "beta"))]
    attrs = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "state_window": 0}
    return contributed("LinearAttention", names, ["y", "now"], **attrs), feeds, {}


def causal_conv(random: Generator) -> Case:
    kind = str(random.choice(["none", "silu"]))
    feeds = {"x": some(random, 2, 4, 5), "past": some(random, 2, 4, 2)}
    parts = {"w": some(random, 4, 1, 3), "b": some(random, 4)}
    node = contributed("CausalConvWithState", ["x", "w", "b", "past"], ["y", "now"], activation=kind, ndim=1)
    return node, feeds, parts


def rotary(random: Generator) -> Case:
    """A RotaryEmbedding that rotates one half of each head."""
    feeds = {"x": some(random, 2, 3, 16), "p": random.integers(0, 9, (2, 3))}
    attrs = {"num_heads": 2, "rotary_embedding_dim": 4, "interleaved": int(random.integers(2)), "scale": 2.0}
    parts = {"cos": some(random, 9, 2), "sin": some(random, 9, 2)}
    return contributed("RotaryEmbedding", ["x", "p", "cos", "sin"], ["y"], **attrs), feeds, parts


def rotary_of_streams(random: Generator) -> Case:
    shape = (2, 3, 4 * 16) if random.random() < 0.5 else (2, 4, 3, 16)
    feeds = {"x": some(random, *shape), "p": random.integers(0, 9, (3, 2, 3))}
    layout, half = int(random.integers(2)), 8 - 4 * int(random.integers(2))
    sizes = {(8, 0): [2, 5, 1], (8, 1): [4, 2, 2], (4, 0): [1, 0, 3], (4, 1): [2, 1, 1]}[half, layout]
    attrs = {"mrope_section": sizes, "mrope_layout": layout, "scale": float(random.integers(3)), "num_heads": 4}
    attrs |= {"rotary_embedding_dim": 8} if half == 4 else {}
    parts = {"cos": some(random, 9, half), "sin": some(random, 9, half)}
    interleaved = int(random.integers(2))
    names = ["x", "p", "cos", "sin"]
    return contributed("MRotaryEmbedding", names, ["y"], interleaved=interleaved, **attrs), feeds, parts


def router(random: Generator) -> Case:
    groups, size = int(random.integers(1, 5)), int(random.integers(2, 5))
    feeds = {"x": some(random, 5, groups * size)}
    attrs = {
        "n_group": groups, "topk_group": int(random.integers(1, groups + 1)), "top_k": int(random.integers(1, size)),
        "group_topk": int(random.integers(1, 4)), "router_sentinel": -77.0,
    }  # fmt: skip
    return contributed("MoEGroupRouter", ["x", "b"], ["y"], **attrs), feeds, {"b": some(random, groups * size)}


def all_scores(random: Generator) -> Case:
    feeds, parts = {"x": some(random, 5, 6)}, {"b": some(random, 6)}
    return contributed("MoEGroupRouter", ["x", "b"], ["", "s", "w"], top_k=2), feeds, parts


NEWER = [
    rotary, rotary_of_streams, router, all_scores, gated_norm, norm_of_branches, gated_add, scaled_silu, decay_and_rate,
    linear_attention, causal_conv,
]  # fmt: skip


@pytest.mark.sample(9)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("draw", NEWER, ids=lambda draw: draw.__name__)
def test_parts_of_newer_decoders(draw: Callable[[Generator], Case], seed: int) -> None:
    check(draw(np.random.default_rng(seed)))


def test_attributes_without_an_onnx_form_are_refused() -> None:
    feeds, parts = {"x": floats(2, 4, 5), "past": floats(2, 4, 4)}, {"w": floats(4, 1, 3)}
    node = contributed("CausalConvWithState", ["x", "w", "", "past"], ["y", "now"], dilation=2)
    with pytest.raises(UnsupportedError, match="attribute 'dilation' is 2, expected 1"):
        lathe.load(proto_of(node, feeds, parts, open_=False))
