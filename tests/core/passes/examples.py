"""Examples of graphs that passes rewrite, built in Python because their text would be long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lathe.core.autodiff import gradients
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.pipeline import optimize
from tests.core.passes.test_pipeline import encoder, image_net
from tests.core.passes.test_quantized import network, pair, quantized, scalar, weight

N = symbol("n")
F32 = DType.FLOAT32


def _input(b: Builder, name: str, *shape: Any, dtype: DType = F32) -> Value:
    return b.input(name, TensorType(dtype, shape))


def _weight(b: Builder, *shape: int) -> Value:
    return b.constant(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32) * 0.3)


def trained_convolutions() -> Graph:
    """Two convolutions, pooling and a product, with the gradients of their weights."""
    b = Builder(Graph("trained"))
    x, w, v = _input(b, "x", 8, 3, 8, 8), _input(b, "w", 4, 3, 3, 3), _input(b, "v", 6, 4, 3, 3)
    bias, u = _input(b, "bias", 4), _input(b, "u", 24, 5)
    h = b("Relu", b("Conv", x, w, bias, pads=(1, 1, 1, 1)))
    h = b("MaxPool", h, kernel_shape=(2, 2), strides=(2, 2))
    h = b("Relu", b("Conv", h, v))
    y = b("MatMul", b("Flatten", h, axis=1), u)
    b.graph.outputs = [y]
    return _learning(gradients(b.graph, of=y.name, with_respect_to=["w", "v", "bias", "u"]), "w", "v")


def trained_layers() -> Graph:
    """Two products as passes write them, with the gradients of their weights: right operands are computed."""
    b = Builder(Graph("layers"))
    x, w, v = _input(b, "x", 32, 6), _input(b, "w", 6, 8), _input(b, "v", 8, 4)
    h = b("Relu", b("FusedMatMul", x, w))
    dh = b("FusedMatMul", b("FusedMatMul", h, v), v, perm_b=(1, 0))
    b.graph.outputs = [b("FusedMatMul", x, dh, perm_a=(1, 0)), b("FusedMatMul", h, dh, perm_a=(1, 0))]
    return _learning(b.graph, "w", "v")


def _learning(graph: Graph, *weights: str) -> Graph:
    """The graph with these inputs turned into states."""
    rng = np.random.default_rng(0)
    for value in [value for value in graph.inputs if value.name in weights]:
        graph.inputs.remove(value)
        initial = rng.normal(0, 0.3, value.tensor.evaluate({})).astype(np.float32)
        graph.states.append(State(value, value, initial))
    return graph


def loop_with_a_body() -> Graph:
    """A loop of five steps x = x * 0.5 * 2 + 1, with constants to fold."""
    b = Builder(Graph("loop"))
    x = _input(b, "x", N, 3)
    body = Builder(Graph("body"))
    trip, going, carried = (
        _input(body, name, *shape, dtype=dtype)
        for name, shape, dtype in (("i", (), DType.INT64), ("c", (), DType.BOOL), ("v", (N, 3), F32))
    )
    half = body("Mul", body("Mul", carried, body.constant(np.float32(0.5))), body.constant(np.float32(2)))
    body.graph.outputs = [body("Identity", going), body("Add", half, body.constant(np.float32(1)))]
    assert trip is body.graph.inputs[0]
    b.graph.outputs = [b("Loop", b.constant(np.int64(5)), None, x, body=body.graph)]
    return b.graph


def chosen_branch() -> Graph:
    """A branch by data: both bodies are optimized in place."""
    b = Builder(Graph("branch"))
    x = _input(b, "x", N, 3)
    condition = b("Squeeze", b("Greater", b("ReduceSum", x, axes=(0, 1), keepdims=1), b.constant(np.float32(0))))
    branches = []
    for op in ("Relu", "Neg"):
        inner = Builder(Graph(op.lower()))
        inner.graph.outputs = [inner("Add", inner(op, x), inner.constant(np.zeros(1, np.float32)))]
        branches.append(inner.graph)
    b.graph.outputs = [b("If", condition, then_branch=branches[0], else_branch=branches[1])]
    return b.graph


def what_changes_nothing() -> Graph:
    """Operators without effect: subtract 0, repeat once, slice everything, split into one part."""
    b = Builder(Graph("nothing"))
    x = _input(b, "x", N, 6)
    y = b("Neg", b("Sub", x, b.constant(np.float32(0))))
    y = b("Neg", b("Tile", y, repeats=(1, 1)))
    y = b("Neg", b("Clip", y))
    y = b("Neg", b("Split", y, axis=1, num_outputs=1))
    b.graph.outputs = [y]
    return b.graph


def said_twice() -> Graph:
    b = Builder(Graph("twice"))
    x, flag = _input(b, "x", N, 6), _input(b, "flag", N, dtype=DType.BOOL)
    b.graph.outputs = [b("Relu", b("Relu", x)), b("And", b("Not", b("Not", flag)), flag)]
    return b.graph


def product_read_across() -> Graph:
    """The transpose of a product of two matrices, which is the product of their transposes."""
    b = Builder(Graph("across"))
    x = _input(b, "x", N, 4)
    y = b("FusedMatMul", x, _weight(b, 4, 5), perm_y=(1, 0))
    b.graph.outputs = [y]
    return b.graph


def product_of_bytes() -> Graph:
    b = Builder(Graph("bytes"))
    x, zero = _input(b, "x", N, 4, dtype=DType.UINT8), _input(b, "zero", dtype=DType.UINT8)
    w = b.constant(np.arange(-10, 10, dtype=np.int8).reshape(4, 5))
    b.graph.outputs = [b("MatMulInteger", x, w, zero), b("MatMulInteger", x, w)]
    return b.graph


def convolution_of_bytes() -> Graph:
    b = Builder(Graph("bytes"))
    x = _input(b, "x", N, 2, 5, 5, dtype=DType.UINT8)
    w = b.constant(np.arange(-18, 18, dtype=np.int8).reshape(2, 2, 3, 3))
    y = b("ConvInteger", x, w, b.constant(np.uint8(3)), pads=(1, 1, 1, 1))
    z = b("ConvInteger", x, w)
    b.graph.outputs = [y, z]
    return b.graph


def image_network() -> Graph:
    return optimize(image_net())[0]


def language_network() -> Graph:
    return optimize(encoder())[0]


# -- quantized --------------------------------------------------------------------------------------------------------


def _quantized(write: Callable[[Builder, Value], Value], *shape: int, dtype: DType = F32) -> Callable[[], Graph]:
    def make() -> Graph:
        return network(write, *shape, dtype=dtype)

    make.__name__ = write.__name__.strip("_")
    return make


def _quantized_products(b: Builder, x: Value) -> Value:
    y = b("MatMul", pair(b, x), weight(b, 24, 20, axis=1))
    y = pair(b, b("Relu", b("Add", y, b.constant(np.ones(20, np.float32)))), 0.1, 3)
    y = b(
        "Gemm", y, weight(b, 11, 20, axis=0, dtype=np.uint8), b.constant(np.ones(11, np.float32)), transB=1, alpha=0.5
    )
    return pair(b, y, 0.1, -7, np.int8)


def _quantized_convolutions(b: Builder, x: Value) -> Value:
    numbers = b.constant(np.arange(8, dtype=np.int32) * 50)
    bias = b("DequantizeLinear", numbers, b.constant(np.full(8, 1e-3, np.float32)), axis=0)
    x = pair(b, b("Conv", pair(b, x), weight(b, 8, 8, 3, 3, axis=0), bias, pads=(1,) * 4), 0.2, 100)
    inner = pair(b, b("Relu", b("Conv", x, weight(b, 8, 1, 3, 3, axis=0), group=8, pads=(1,) * 4)), 0.1, 0)
    joined = pair(b, b("Relu", b("Add", pair(b, b("Conv", inner, weight(b, 8, 8, 1, 1, axis=0)), 0.2, 128), x)), 0.2, 0)
    return pair(b, b("MaxPool", joined, kernel_shape=(2, 2), strides=(2, 2)), 0.2, 0)


def _quantized_operators(b: Builder, x: Value) -> Value:
    q, scale = quantized(b, x, 0.05, 100), scalar(b, 0.1, np.float32)
    w = b.constant((np.arange(288) % 19 - 9).astype(np.int8).reshape(4, 8, 3, 3))
    args = (q, scalar(b, 0.05, np.float32), scalar(b, 100, np.uint8), w, b.constant(np.full(4, 0.02, np.float32)))
    bias = b.constant(np.arange(4, dtype=np.int32))
    y = b("QLinearConv", *args, b.constant(np.zeros(4, np.int8)), scale, scalar(b, 50, np.uint8), bias)
    m = b.constant((np.arange(24) % 17 - 8).astype(np.int8).reshape(4, 6))
    fine = scalar(b, 0.012, np.float32)
    more = (m, scalar(b, 0.03, np.float32), scalar(b, 0, np.int8), fine, scalar(b, 128, np.uint8))
    z = b("QLinearMatMul", b("Transpose", y, perm=(0, 2, 3, 1)), scale, scalar(b, 50, np.uint8), *more)
    return b("DequantizeLinear", z, fine, scalar(b, 128, np.uint8))


def _integer_products(b: Builder, x: Value) -> Value:
    w = b.constant((np.arange(180) % 100).astype(np.uint8).reshape(20, 9))
    return b("MatMulInteger", x, w, b.constant(np.array(99, x.dtype.numpy)), scalar(b, 60, np.uint8))


def fitted_models() -> Graph:
    """Every ai.onnx.ml (classical ML) operator that has an expansion, in the forms of exporters."""
    b = Builder(Graph("fitted"))
    x, whole = _input(b, "x", N, 4), _input(b, "whole", N, 3, dtype=DType.INT32)
    random = np.random.default_rng(5)

    def numbers(count: int) -> tuple[float, ...]:
        return tuple(random.standard_normal(count).astype(np.float32).tolist())

    scaled = b("Scaler", x, offset=numbers(4), scale=numbers(1))
    norms = [b("Normalizer", scaled, norm=norm) for norm in ("MAX", "L1", "L2")]
    filled = [
        b("Imputer", x, imputed_value_floats=(0.5,), replaced_value_float=wanted) for wanted in (float("nan"), 0.0)
    ]
    picked = b("ArrayFeatureExtractor", x, b.constant(np.int64([3, 0])))
    largest = b("Cast", b("ArgMax", x, axis=1, keepdims=1), to=DType.INT64.onnx_code)
    label = b("ArrayFeatureExtractor", b.constant(np.int64([5, 6, 7, 8])), largest)
    nearest = b.emit("TopK", x, b.constant(np.int64([2])), outputs=2, axis=1)[1]
    pairs = b("ArrayFeatureExtractor", b.constant(np.float32([5, 6, 7, 8])), b("Flatten", nearest, axis=1))
    smallest = b("ArrayFeatureExtractor", b.constant(np.float32([5, 6, 7, 8])), b("ArgMin", x, axis=1, keepdims=1))
    three = {"coefficients": numbers(12), "intercepts": numbers(3)}
    one = b("LinearRegressor", whole, coefficients=numbers(3))
    more = [b("LinearRegressor", x, **three, targets=3, post_transform=kind) for kind in ("NONE", "LOGISTIC")]
    over = b("Binarizer", b("Cast", whole, to=F32.onnx_code), threshold=0.5)
    found = [*norms, *filled, picked, label, pairs, smallest, over, one, *more]
    found += b.emit("LinearClassifier", x, outputs=2, **three, classlabels_ints=(7, 8, 9), post_transform="SOFTMAX")
    for labels, weighed, kind in (
        ((4, 5, 6), (0, 1, 2), "NONE"), ((4, 5), (1, 1, 1), "SOFTMAX"), ((4, 5), (0, 0, 0), "NONE"),
        ((4, 5), (0, 0, 0), "LOGISTIC"),
    ):  # fmt: skip
        attrs = {**_stump(weighed), "classlabels_int64s": labels, "post_transform": kind}
        found += b.emit("TreeEnsembleClassifier", x, outputs=2, **attrs)
    for kind in ("NONE", "LOGISTIC"):
        found += b.emit(
            "SVMClassifier", x, outputs=2, **_machine(numbers), classlabels_ints=(4, 5), post_transform=kind
        )
    chances = {"prob_a": (-1.0,), "prob_b": (0.25,), "classlabels_ints": (1, 0), "post_transform": "SOFTMAX"}
    found += b.emit("SVMClassifier", x, outputs=2, **_machine(numbers), **chances)
    found += b.emit("SVMClassifier", x, outputs=2, **_machine(numbers), classlabels_strings=("a", "b"))[1:]
    found += b.emit("SVMClassifier", x, outputs=2, coefficients=numbers(12), rho=(0.5,), classlabels_ints=(7, 8, 9))
    regressor = {name: attr for name, attr in _machine(numbers).items() if name != "vectors_per_class"}
    found += [
        b("SVMRegressor", x, **regressor, n_supports=5, post_transform="LOGISTIC"),
        b("SVMRegressor", x, **regressor, n_supports=5, post_transform="LOGISTIC", one_class=1),
    ]
    rounded = b("Round", b("Mul", x, b.constant(np.float32(3))))
    found += [
        b("LabelEncoder", whole, keys_tensor=np.int32([-1, 2, 0]), values_floats=(0.5, 1.5, 2.5), default_float=9.0),
        b("LabelEncoder", rounded, keys_floats=(2.0, -1.0, 0.0), values_int64s=(5, 6, 7), default_int64=-3),
        b("OneHotEncoder", whole, cats_int64s=(1, 0, -2)),
        b("OneHotEncoder", largest, cats_int64s=(3, 1, 0, 2), zeros=0),
    ]
    b.graph.outputs = found
    return b.graph


def weights_of_few_bits() -> Graph:
    """Products of rows with dequantized constants of every form, and with quantized rows."""
    b = Builder(Graph("few bits"))
    x = _input(b, "x", N, 256)
    random = np.random.default_rng(6)

    def codes(low: int, high: int, dtype: Any) -> Value:
        return b.constant(random.integers(low, high, (256, 256)).astype(dtype))

    def scales(*shape: int) -> Value:
        return b.constant(random.uniform(0.01, 0.1, shape).astype(np.float32))

    halves = random.integers(0, 16, (8, 256)).astype(np.uint8)
    by_blocks = b("DequantizeLinear", codes(0, 16, np.uint8), scales(8, 256), b.constant(halves), axis=0, block_size=32)
    by_rows = b("DequantizeLinear", codes(-128, 128, np.int8), scales(256), axis=0)
    of_tensor = b("DequantizeLinear", codes(-2, 2, np.int8), scales())
    step, point = scales(), b.constant(np.uint8(7))
    rounded = b("DequantizeLinear", b("QuantizeLinear", x, step, point), step, point)
    b.graph.outputs = [
        b("Gemm", x, by_blocks, b.constant(random.standard_normal(256).astype(np.float32))),
        b("MatMul", x, b("Transpose", by_rows, perm=(1, 0))),
        b("Gemm", x, by_rows, transB=1),
        b("MatMul", x, by_rows),
        b("MatMul", x, of_tensor),
        b("Gemm", x, of_tensor, alpha=0.5),
        b("MatMul", b("Reshape", rounded, b.constant(np.int64([-1, 256]))), of_tensor),
    ]
    return b.graph


def columns_of_text() -> Graph:
    """Columns of text that are moved, and compared with constants in all ways."""
    b = Builder(Graph("text"))
    x = _input(b, "x", N, 3, dtype=DType.STRING)
    words = b.constant(np.array([["a", "d"]], object))
    both = b("Concat", b("Gather", x, b.constant(np.int64([2, 0])), axis=1), words, axis=0)
    categories = {"cats_strings": ("c", "", "a"), "cats_int64s": (5, 6, 7), "default_int64": 8}
    b.graph.outputs = [
        b("LabelEncoder", both, keys_strings=("a", "c"), values_floats=(0.5, 1.5), default_float=9.0),
        b("LabelEncoder", x, keys_strings=("b", "", "b"), values_int64s=(1, 2, 3)),
        b("LabelEncoder", x, keys_strings=("b",), values_strings=("a",), default_string="c"),
        b("OneHotEncoder", both, cats_strings=("b", "a", "c")),
        b("CategoryMapper", x, **categories),
        b("Equal", both, words),
        b("Equal", x, x),
        both,
    ]
    return b.graph


def _machine(numbers: Callable[[int], tuple[float, ...]]) -> dict[str, Any]:
    """A support vector machine of two classes."""
    return {
        "kernel_type": "RBF", "kernel_params": (0.25, 0.0, 0.0), "support_vectors": numbers(20),
        "coefficients": numbers(5), "rho": numbers(1), "vectors_per_class": (2, 3),
    }  # fmt: skip


def _stump(ids: tuple[int, ...]) -> dict[str, Any]:
    """A tree of two decisions whose three leaves weigh these classes."""
    return {
        "nodes_treeids": (0,) * 5, "nodes_nodeids": (0, 1, 2, 3, 4), "nodes_featureids": (1, 3, 0, 0, 0),
        "nodes_values": (0.25, -0.5, 0.0, 0.0, 0.0), "nodes_modes": ("BRANCH_LEQ",) * 2 + ("LEAF",) * 3,
        "nodes_truenodeids": (1, 2, 0, 0, 0), "nodes_falsenodeids": (4, 3, 0, 0, 0), "class_treeids": (0, 0, 0),
        "class_nodeids": (2, 3, 4), "class_ids": ids, "class_weights": (0.75, 0.25, 0.5), "base_values": (0.125,),
    }  # fmt: skip


def half_network() -> Graph:
    """A model of float16: rows of a table, products, a comparison, and conversions of every kind."""
    b = Builder(Graph("halves"))
    half = DType.FLOAT16
    x, rows = _input(b, "x", N, 8, dtype=half), _input(b, "rows", N, dtype=DType.INT64)
    table, weights = (b.constant((_random(4, 8) * 0.1).astype(np.float16)) for _ in range(2))
    looked_up = b("Gather", table, rows)
    y = b("MatMul", b("Add", looked_up, b("Mul", x, x)), b("Transpose", weights, perm=(1, 0)))
    like = b("Cast", b("Cast", x, to=F32.onnx_code), to=half.onnx_code)
    b.graph.outputs = [
        b("Relu", y), b("Cast", y, to=F32.onnx_code), b("Greater", b("Neg", x), x), b("Shape", y), b("Add", like, x),
        b("Reshape", b("Abs", y), b.constant(np.int64([-1, 2]))), b("EyeLike", y, dtype=half.onnx_code),
    ]  # fmt: skip
    return b.graph


def _random(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape)


EXAMPLES: Mapping[str, Sequence[Callable[[], Graph]]] = {
    "batch_last": [trained_convolutions],
    "bfloat16": [image_network, language_network, trained_layers],
    "float16": [image_network, language_network, trained_layers],
    "coded_text": [columns_of_text],
    "control": [loop_with_a_body, chosen_branch],
    "eliminate": [what_changes_nothing],
    "classic_ml": [fitted_models],
    "gemm": [product_read_across, product_of_bytes],
    "layout": [convolution_of_bytes],
    "weight_only": [weights_of_few_bits],
    "quantized": [
        _quantized(_quantized_products, 24),
        _quantized(_quantized_convolutions, 8, 10, 10),
        _quantized(_quantized_operators, 8, 6, 6),
        _quantized(_integer_products, 20, dtype=DType.UINT8),
        _quantized(_integer_products, 20, dtype=DType.INT8),
    ],
    "simplify": [said_twice],
    "widen": [half_network],
}
