"""Structured pruning: channels that are 0 disappear without a trace, and all that depends on a channel goes with it.

Each network has random channels whose weights are 0 in all layers that must lose them together. They have the least
magnitude, so exactly they must go, and the results must stay those of ONNX Runtime for the whole network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest

import lathe
from lathe import nn
from lathe.core.compress.channel_pruning import ChannelPruning, remove_channels
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph
from loadtest import zoo
from tests.core.compress.test_static import ort_run, run
from tests.core.small_models import model
from tests.random_numbers import RNG

F = np.float32


class Network:
    """A model as text, and its weights. `dead` lists (weights, axis, group): equal groups lose the same channels."""

    def __init__(self, signature: str, nodes: str, shapes: Mapping[str, tuple[int, ...]], dead: list[Any]) -> None:
        self.arrays = {name: RNG.standard_normal(shape).astype(F) for name, shape in shapes.items()}
        self.going: dict[str, np.ndarray] = {}
        for name, axis, group in dead:
            extent = self.arrays[name].shape[axis]
            if group not in self.going:
                self.going[group] = RNG.permutation(extent) < extent // 2
            where: list[Any] = [slice(None)] * self.arrays[name].ndim
            where[axis] = self.going[group]
            self.arrays[name][tuple(where)] = 0
        for name in self.arrays:
            if name.startswith("var"):  # variances of a normalization
                self.arrays[name] = np.abs(self.arrays[name]) + F(0.5)
        proto = onnx.load_model_from_string(model(signature, nodes))
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in self.arrays.items())
        self.data = bytes(proto.SerializeToString())


def residual() -> Network:
    """Two blocks with normalizations and a projection; the sums tie three convolutions."""
    return Network(
        "float[n,3,8,8] x => float[n,5] y",
        "a = Conv<pads=[1,1,1,1]>(x, w) b = BatchNormalization(a, ga, ba, ma, vara) c = Relu(b)"
        " d = Conv<pads=[1,1,1,1]>(c, u, du) e = Relu(d) f = Conv<pads=[1,1,1,1]>(e, v, dv) g = Add(f, c) h = Relu(g)"
        " i = Conv<strides=[2,2]>(h, p, dp) j = Conv<strides=[2,2]>(h, q) k = Add(i, j)"
        " z = GlobalAveragePool(k) m = Flatten(z) y = Gemm<transB=1>(m, o, do)",
        {"w": (8, 3, 3, 3), "ga": (8,), "ba": (8,), "ma": (8,), "vara": (8,), "u": (6, 8, 3, 3), "du": (6,),
         "v": (8, 6, 3, 3), "dv": (8,), "p": (12, 8, 1, 1), "dp": (12,), "q": (12, 8, 1, 1), "o": (5, 12), "do": (5,)},
        [("w", 0, "s"), ("ba", 0, "s"), ("ma", 0, "s"), ("v", 0, "s"), ("dv", 0, "s"), ("u", 0, "i"), ("du", 0, "i"),
         ("p", 0, "t"), ("dp", 0, "t"), ("q", 0, "t")],
    )  # fmt: skip


def branches() -> Network:
    """A concatenation, a depthwise convolution with two outputs per channel, a split, a flattening and a padding."""
    return Network(
        "float[n,2,6,6] x => float[n,7] y",
        "a = Conv(x, w, b) c = Conv(x, u) r = Concat<axis=1>(a, c) d = Relu(r) e = Conv<group=14>(d, v, dv)"
        " g = Relu(e) h, i = Split<axis=1>(g, parts) j = Conv(h, k) l = GlobalMaxPool(i) o = Add(j, l)"
        " s = Slice(o, begin, end, axis) m = Pad(s, pads) t = Flatten(m) y = MatMul(t, z)",
        {"w": (6, 2, 1, 1), "b": (6,), "u": (8, 2, 1, 1), "v": (28, 1, 3, 3), "dv": (28,), "k": (16, 12, 1, 1),
         "z": (6 * 25, 7)},
        [],
    )  # fmt: skip


def heads(name: str) -> Network:
    """Attention as PyTorch's exporter writes it, with separate or packed projections, and a layer after it."""
    project = {
        "separate": "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)",
        "packed": "p = MatMul(x, wp) q, k, v = Split<axis=2>(p, parts)",
    }[name]
    split = " ".join(f"{e}r = Reshape({e}, split) {e}h = Transpose<perm=[0,2,1,3]>({e}r)" for e in "qkv")
    shapes = {"wo": (24, 10), "wf": (10, 16), "bf": (16,), "wl": (16, 3)}
    shapes |= {"wp": (10, 72)} if name == "packed" else {"wq": (10, 24), "wk": (10, 24), "wv": (10, 24)}
    return Network(
        "float[n,5,10] x => float[n,5,3] y",
        f"{project} {split} kt = Transpose<perm=[0,1,3,2]>(kh) s = MatMul(qh, kt) a = Softmax<axis=-1>(s)"
        " o = MatMul(a, vh) ot = Transpose<perm=[0,2,1,3]>(o) m = Reshape(ot, merge) r = MatMul(m, wo)"
        " t = Add(r, x) f = MatMul(t, wf) g = Add(f, bf) h = Relu(g) y = MatMul(h, wl)",
        shapes,
        [("wf", 1, "f"), ("bf", 0, "f")],
    )


INTEGERS = {"parts": [12, 16], "begin": [2], "end": [8], "axis": [1], "pads": [0, 0, 1, 0, 0, 0, 0, 0],
            "split": [0, 5, 4, 6], "merge": [0, 5, 24]}  # fmt: skip


def with_integers(network: Network, **more: Any) -> bytes:
    proto = onnx.load_model_from_string(network.data)
    used = {name for node in proto.graph.node for name in node.input}
    for name, numbers in {**INTEGERS, **more}.items():
        if name in used:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(numbers, np.int64), name))
    return bytes(proto.SerializeToString())


def shapes_of(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {value.name.removesuffix("_2"): array.shape for value, array in graph.constants.items()}


def assert_same_results(data: bytes, small: Graph, x: np.ndarray) -> None:
    written, expected = lathe.export(small), ort_run(data, {"x": x})
    onnx.checker.check_model(onnx.load_model_from_string(written), full_check=True)
    for got in (ort_run(written, {"x": x}), run(small, {"x": x}), run(written, {"x": x})):
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_dead_channels_of_a_residual_network_disappear() -> None:
    network, x = residual(), RNG.standard_normal((4, 3, 8, 8)).astype(F)
    small, choices = remove_channels(lathe.load(network.data))
    assert_same_results(network.data, small, x)
    assert sorted((choice.before, choice.after) for choice in choices) == [(6, 3), (8, 4), (12, 6)]
    found = shapes_of(small)
    assert (found["w"], found["u"], found["v"], found["q"]) == ((4, 3, 3, 3), (3, 4, 3, 3), (4, 3, 3, 3), (6, 4, 1, 1))
    assert found["o"] == (5, 6)
    assert np.array_equal(small.constants[next(v for v in small.constants if v.name == "w")],
                          network.arrays["w"][~network.going["s"]])  # fmt: skip


def replaced(data: bytes, arrays: Mapping[str, np.ndarray]) -> bytes:
    """The model with other elements of these constants."""
    proto = onnx.load_model_from_string(data)
    for tensor in proto.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return bytes(proto.SerializeToString())


def test_channels_pass_through_concatenation_split_slice_padding_and_flattening() -> None:
    """A channel takes its two depthwise outputs with it; channels that the slice reads are a group of their own.

    The whole network with zeros in place of the channels that went has the results of the small one.
    """
    network = branches()
    arrays = {**network.arrays, "dv": np.zeros(28, F), "b": np.zeros(6, F)}  # a bias would keep channels alive
    data = replaced(with_integers(network, pads=[0, 0, 1, 1, 0, 0, 0, 0]), arrays)
    small, choices = remove_channels(lathe.load(data))
    assert sorted((choice.before, choice.after) for choice in choices) == [(3, 2), (5, 3), (6, 3)]
    conv = next(node for node in small.nodes if node.op == "Conv" and node.attrs.get("group", 1) != 1)
    assert conv.attrs["group"] == 8
    kept = {value.name: array for value, array in small.constants.items()}
    assert (kept["v"].shape, kept["k"].shape, kept["z"].shape) == ((16, 1, 3, 3), (10, 6, 1, 1), (4 * 25, 7))
    for name in ("w", "u"):
        stays = (arrays[name][:, None] == kept[name]).all(axis=(2, 3, 4)).any(axis=1)
        arrays[name] = np.where(stays[:, None, None, None], arrays[name], F(0))
    arrays["k"] = np.where(np.repeat(stays, 2)[:, None, None, None], arrays["k"], F(0))
    assert_same_results(replaced(data, arrays), small, RNG.standard_normal((3, 2, 6, 6)).astype(F))


@pytest.mark.parametrize("kind", ["separate", "packed"])
def test_heads_of_attention_go_with_their_queries_keys_and_values(kind: str) -> None:
    network = heads(kind)
    arrays = dict(network.arrays)
    dead = RNG.permutation(4) < 2
    columns = np.repeat(dead, 6)
    for name in ("wq", "wk", "wv"):
        if name in arrays:
            arrays[name][:, columns] = 0
    if kind == "packed":
        arrays["wp"][:, np.tile(columns, 3)] = 0
    data, x = replaced(with_integers(network, parts=[24, 24, 24]), arrays), RNG.standard_normal((3, 5, 10)).astype(F)
    small, choices = remove_channels(lathe.load(data))
    assert_same_results(data, small, x)
    assert sorted((choice.before, choice.after) for choice in choices) == [(4, 2), (16, 8)]
    found = shapes_of(small)
    assert found["wo"] == (12, 10)
    assert found["wp" if kind == "packed" else "wq"] == (10, 36 if kind == "packed" else 12)


def test_inputs_outputs_and_operators_without_a_rule_keep_their_channels() -> None:
    weights = {"w": (8, 4), "v": (8, 6), "b": (8,)}
    network = Network("float[n,4] x => float[n,6] y, float[n,8] h",
                      "h = Gemm<transB=1>(x, w, b) y = MatMul(h, v)", weights, [])  # fmt: skip
    with pytest.raises(UnsupportedError, match="expected layers with channels that can be removed, got none"):
        remove_channels(lathe.load(network.data))
    network = Network("float[n,4] x => float[n,6] y",
                      "h = Gemm<transB=1>(x, w, b) s = CumSum(h, axis) y = MatMul(s, v)", weights, [])  # fmt: skip
    with pytest.raises(UnsupportedError, match="got none"):
        remove_channels(lathe.load(with_integers(network, axis=1)))


def test_equal_biases_of_different_layers_do_not_tie_them() -> None:
    """Each layer loses its own channels, although both read the same bias of zeros."""
    shapes = {"w": (8, 4), "u": (8, 8), "v": (8, 3), "b": (8,)}
    network = Network("float[n,4] x => float[n,3] y",
                      "h = Gemm<transB=1>(x, w, b) r = Relu(h) i = Gemm<transB=1>(r, u, b) s = Relu(i)"
                      " y = MatMul(s, v)",
                      shapes, [("w", 0, "first"), ("u", 0, "second"), ("b", 0, "none")])  # fmt: skip
    data = replaced(network.data, {"b": np.zeros(8, F)})
    small, choices = remove_channels(lathe.load(data))
    assert_same_results(data, small, RNG.standard_normal((5, 4)).astype(F))
    assert [(choice.before, choice.after) for choice in choices] == [(8, 4), (8, 4)]


@pytest.mark.parametrize(("share", "multiple", "rest"), [(0.5, 1, 12), (0.3, 1, 17), (0.6, 8, 16), (0.99, 1, 1)])
def test_the_rest_is_a_multiple(share: float, multiple: int, rest: int) -> None:
    shapes = {"w": (24, 4), "v": (24, 3)}
    network = Network(
        "float[n,4] x => float[n,3] y", "h = Gemm<transB=1>(x, w) r = Relu(h) y = MatMul(r, v)", shapes, []
    )
    small, _ = remove_channels(lathe.load(network.data), ChannelPruning(share, multiple=multiple))
    assert shapes_of(small)["w"] == (rest, 4)


@pytest.mark.parametrize("measure", ["l1", "l2"])
def test_the_channels_of_least_magnitude_go(measure: Any) -> None:
    shapes = {"w": (24, 40), "v": (24, 3)}
    network = Network(
        "float[n,40] x => float[n,3] y", "h = Gemm<transB=1>(x, w) r = Relu(h) y = MatMul(r, v)", shapes, []
    )
    norms = (np.abs(network.arrays["w"]) ** {"l1": 1, "l2": 2}[measure]).sum(axis=1)
    small, _ = remove_channels(lathe.load(network.data), ChannelPruning(measure=measure))
    kept = next(array for value, array in small.constants.items() if value.name == "w")
    assert np.array_equal(kept, network.arrays["w"][norms >= np.sort(norms)[12]])


def test_modules_of_pytorchs_names_lose_heads_and_channels() -> None:
    encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    graph = nn.trace(encoder, {"x": "float32[n,6,16]"}, ["y"])
    small, choices = remove_channels(graph)
    assert sorted((choice.before, choice.after) for choice in choices) == [(4, 2), (32, 16)]
    x = RNG.standard_normal((3, 6, 16)).astype(F)
    assert np.abs(run(small, {"x": x}) - ort_run(lathe.export(small), {"x": x})).max() < 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("lenet", {(6, 3): 1, (16, 8): 1, (120, 60): 1, (84, 42): 1}),
        ("resnet", {(64, 32): 3, (128, 64): 3, (256, 128): 3, (512, 256): 3}),
        ("mobilenet", {(32, 16): 2, (16, 8): 1, (96, 48): 2, (24, 12): 1, (144, 72): 2, (192, 96): 2}),
        ("transformer", {(8, 4): 2, (1024, 512): 2}),
        ("vit", {(3, 2): 4, (768, 384): 4}),
        ("unet-resize", {(32, 16): 5}),
    ],
)
def test_architectures_lose_half_of_their_channels(name: str, groups: dict[tuple[int, int], int]) -> None:
    """Convolutions, residual sums, depthwise convolutions, heads (packed in one product), concatenations."""
    data, feeds = zoo.model(name).SerializeToString(), zoo.feeds(name, 2)
    small, choices = remove_channels(lathe.load(data))
    written = lathe.export(small)
    onnx.checker.check_model(onnx.load_model_from_string(written), full_check=True)
    expected = ort_run(written, feeds)
    assert expected.shape == ort_run(data, feeds).shape
    assert np.abs(run(written, feeds) - expected).max() < 1e-4 * np.abs(expected).max()
    counts = Counter((choice.before, choice.after) for choice in choices)
    assert {each: counts[each] for each in groups} == groups
    assert len(written) < 0.65 * len(data)


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        ({"share": 0.0}, "share: expected more than 0, below 1, got 0.0"),
        ({"share": 1.0}, "share: expected more than 0, below 1, got 1.0"),
        ({"measure": "l3"}, "measure: expected one of l1, l2, got 'l3'"),
        ({"multiple": 0}, "multiple: expected at least 1, got 0"),
        ({"skip": frozenset({"none"})}, "skip: expected names of nodes, got none"),
    ],
)
def test_wrong_choices_are_refused(choice: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        remove_channels(lathe.load(residual().data), ChannelPruning(**choice))
