"""Cross-layer equalization: the same results in ONNX Runtime, equal ranges, and a smaller error with one scale."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import lathe
from lathe.core.compress.equalization import equalize
from lathe.core.compress.products import prepare
from lathe.core.compress.static import StaticQuantization, quantize_static
from lathe.core.ir.graph import Graph
from tests.core.small_models import model
from tests.random_numbers import RNG

F = np.float32
SHAPES = {"w": (6, 3, 3, 3), "b": (6,), "u": (6, 1, 3, 3), "c": (6,), "v": (4, 6, 3, 3), "k": (4 * 16, 7), "d": (7,),
          "m": (7, 5), "e": (5,), "g": (5, 8), "h": (8, 7), "t": (12, 3, 3, 3)}  # fmt: skip
CHAIN = (
    "a = Conv<pads = [1,1,1,1]>(x, w, b) r = Relu(a) f = Conv<group = 6, pads = [1,1,1,1]>(r, u, c)"
    " s = LeakyRelu(f) i = MaxPool<kernel_shape = [2,2], strides = [2,2]>(s) j = Conv<pads = [1,1,1,1]>(i, v)"
    " l = Relu(j) n = Flatten(l) o = MatMul(n, k) p = Add(o, d) q = Relu(p) z = Gemm(q, m, e) y = Relu(z)"
)


def network(nodes: str, columns: int) -> bytes:
    """A model whose channels have very different ranges."""
    proto = onnx.load_model_from_string(model(f"float[batch,3,8,8] x => float[batch,{columns}] y", nodes))
    used = {name for node in proto.graph.node for name in node.input}
    for name in sorted(used & SHAPES.keys()):
        array = RNG.standard_normal(SHAPES[name])
        if array.ndim > 1:
            axis = 0 if array.ndim == 4 else 1
            spread = [-1 if place == axis else 1 for place in range(array.ndim)]
            array = array * np.exp(RNG.uniform(-2, 2, array.shape[axis])).reshape(spread) / np.sqrt(array[0].size)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(F), name))
    return bytes(proto.SerializeToString())


def theirs(data: bytes, x: np.ndarray) -> np.ndarray:
    return np.asarray(ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0])


def ranges(graph: Graph, place: int, axis: int) -> np.ndarray:
    product = [node for node in graph.nodes if node.op in ("Conv", "MatMul", "Gemm")][place]
    weights = np.abs(graph.constants[product.required_input(1)])
    return np.asarray(weights.max(axis=tuple(each for each in range(weights.ndim) if each != axis)))


def test_results_stay_the_same_and_ranges_become_equal() -> None:
    """Over a depthwise convolution, a pooling, a flattening and a bias that an Add adds."""
    data, x = network(CHAIN, 5), RNG.standard_normal((20, 3, 8, 8)).astype(F)
    graph = prepare(lathe.load(data))
    assert equalize(graph) == 4
    exact = theirs(data, x)
    assert np.abs(theirs(lathe.export(graph), x) - exact).max() < 1e-4 * np.abs(exact).max()
    assert ranges(graph, 0, 0) == pytest.approx(ranges(graph, 1, 0), rel=0.02)
    assert ranges(graph, 1, 0) == pytest.approx(ranges(graph, 2, 1), rel=0.02)
    assert ranges(graph, 2, 0) == pytest.approx(ranges(graph, 3, 0).reshape(4, 16).max(axis=1), rel=0.02)
    assert ranges(graph, 3, 1) == pytest.approx(ranges(graph, 4, 0), rel=0.02)


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ("r = Sigmoid(a)", "a sigmoid does not commute with factors"),
        ("r = HardSigmoid(a)", "a hard sigmoid does neither"),
        ("r = Relu(a) o = Neg(r)", "two nodes read r"),
    ],
)
def test_other_pairs_stay_as_they_are(between: str, why: str) -> None:
    nodes = f"a = Conv(x, w, b) {between} j = Conv(r, v) l = GlobalAveragePool(j) y = Flatten(l)"
    if "Neg" in between:
        nodes = nodes.replace("j = Conv(r, v)", "i = Conv(r, v) jj = Conv(o, v) j = Add(i, jj)")
    graph = prepare(lathe.load(network(nodes, 4)))
    before = dict(graph.constants)
    assert equalize(graph) == 0, why
    assert graph.constants == before


def test_skipped_nodes_take_part_in_no_pair() -> None:
    graph = prepare(lathe.load(network(CHAIN, 5)))
    convolutions = [node for node in graph.nodes if node.op == "Conv"]
    for place, node in enumerate(convolutions):
        node.name = f"conv{place}"
    assert equalize(graph, {"conv1"}) == 2


def test_one_scale_for_a_tensor_loses_less_after_equalization() -> None:
    data, x = network(CHAIN, 5), RNG.standard_normal((200, 3, 8, 8)).astype(F)
    exact, found = theirs(data, x), {}
    for equalizes in (False, True):
        options = StaticQuantization("min-max", per_channel=False, equalizes=equalizes)
        small = quantize_static(lathe.load(data), [{"x": x}], options, threads=1)
        found[equalizes] = np.sqrt(((theirs(lathe.export(small), x) - exact) ** 2).mean())
    assert found[True] < 0.9 * found[False]
