"""The whole pass pipeline: results for typical networks, guarantees, reports and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lathe.core.frontends.onnx import load
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Node, Value, captures
from lathe.core.ir.text import parse_graph, print_graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ir.verify import verify
from lathe.core.passes.pipeline import Options, optimize, prepare, run_passes
from lathe.core.passes.rewrite.base import PassError, PassResult
from lathe.core.passes.simplify.bind_params import BindParams
from lathe.core.passes.simplify.eliminate import Eliminate
from lathe.core.passes.simplify.fold_constants import FoldConstants
from lathe.core.reference import interpret
from tests.core.passes.case_files import feeds, operators
from tests.core.small_models import model
from tests.random_numbers import RNG

DIGITS = Path(__file__).parents[3] / "model_repo" / "digits" / "1" / "model.onnx"


def weight(b: Builder, *shape: int) -> Value:
    return b.constant(RNG.standard_normal(shape).astype(np.float32))


def image_net() -> Graph:
    """Convolution, batch normalization, a residual block with a projection, pooling and a classifier."""
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 3, 8, 8)))
    stem = b("Relu", _normalized(b, b("Conv", x, weight(b, 4, 3, 3, 3), pads=(1, 1, 1, 1)), 4))
    inner = b("Relu", _normalized(b, b("Conv", stem, weight(b, 4, 4, 1, 1)), 4))
    inner = _normalized(b, b("Conv", inner, weight(b, 8, 4, 3, 3), pads=(1, 1, 1, 1)), 8)
    shortcut = _normalized(b, b("Conv", stem, weight(b, 8, 4, 1, 1)), 8)
    block = b("Relu", b("Add", inner, shortcut))
    pooled = b("MaxPool", block, kernel_shape=(2, 2), strides=(2, 2))
    flat = b("Flatten", pooled, axis=1)
    b.graph.outputs = [b("Gemm", flat, weight(b, 10, 128), weight(b, 10), transB=1, name="y")]
    return b.graph


@pytest.mark.parametrize("order", ["C", "F"])
def test_weights_after_a_flattened_image_are_permuted_to_its_layout(order: Literal["C", "F"]) -> None:
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 3, 6, 5)))
    image = b("Relu", b("Conv", x, weight(b, 4, 3, 3, 3)))
    rows = b.constant(np.asarray(RNG.standard_normal((4 * 4 * 3, 7)).astype(np.float32), order=order))
    b.graph.outputs = [b("MatMul", b("Flatten", image, axis=1), rows, name="y")]
    optimized, _ = optimize(b.graph)
    assert not any(node.op == "Transpose" and node.inputs[0] is not optimized.inputs[0] for node in optimized.nodes)
    given = {"x": RNG.standard_normal((2, 3, 6, 5)).astype(np.float32)}
    (expected,), (actual,) = (interpret(graph, given).values() for graph in (b.graph, optimized))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def _normalized(b: Builder, x: Value, channels: int) -> Value:
    variance = b.constant(RNG.uniform(0.5, 2.0, channels).astype(np.float32))
    return b("BatchNormalization", x, *(weight(b, channels) for _ in range(3)), variance)


def encoder() -> Graph:
    """One transformer layer as PyTorch exports it, with the normalization spelled out."""
    b = Builder(Graph("encoder"))
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 12, 8)))
    q, k, v = (_heads(b, _linear(b, x, 8, 8)) for _ in range(3))
    q, v = (b("Transpose", value, perm=(0, 2, 1, 3)) for value in (q, v))
    scores = b("Div", b("MatMul", q, b("Transpose", k, perm=(0, 2, 3, 1))), b.constant(np.float32(2.0)))
    context = b("Transpose", b("MatMul", b("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
    merged = b("Reshape", context, b.constant(np.array([0, 0, -1])))
    x = _layer_norm(b, b("Add", x, _linear(b, merged, 8, 8)))
    hidden = _gelu(b, _linear(b, x, 8, 16))
    x = _layer_norm(b, b("Add", x, _linear(b, hidden, 16, 8)))
    b.graph.outputs = [b("ReduceMean", x, b.constant(np.array([1])), keepdims=0, name="y")]
    return b.graph


def _linear(b: Builder, x: Value, inputs: int, outputs: int) -> Value:
    return b("Add", weight(b, outputs), b("MatMul", x, weight(b, inputs, outputs)))


def _heads(b: Builder, x: Value) -> Value:
    return b("Reshape", x, b.constant(np.array([0, 0, 2, 4])))


def _layer_norm(b: Builder, x: Value) -> Value:
    last = b.constant(np.array([-1]))
    centred = b("Sub", x, b("ReduceMean", x, last, keepdims=1))
    variance = b("ReduceMean", b("Pow", centred, b.constant(np.float32(2.0))), last, keepdims=1)
    normal = b("Div", centred, b("Sqrt", b("Add", variance, b.constant(np.float32(1e-5)))))
    return b("Add", b("Mul", normal, weight(b, 8)), weight(b, 8))


def _gelu(b: Builder, x: Value) -> Value:
    erf = b("Erf", b("Div", x, b.constant(np.float32(1.4142135))))
    return b("Mul", b("Mul", x, b("Add", erf, b.constant(np.float32(1.0)))), b.constant(np.float32(0.5)))


def assert_same_results(graph: Graph, optimized: Graph) -> None:
    given = feeds(graph)
    expected, got = interpret(graph, given), interpret(optimized, given)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5 * float(np.abs(array).max()))


def test_an_image_network_becomes_convolutions_with_epilogues() -> None:
    graph = image_net()
    optimized, _ = optimize(graph)
    # Transpose: of the input; Reshape: flattens the image, whose new order is in the classifier's weight
    assert operators(optimized) == {"Transpose": 1, "FusedConv": 4, "MaxPool": 1, "Reshape": 1, "FusedMatMul": 1}
    assert optimized.nodes[0].op == "Transpose"
    assert_same_results(graph, optimized)


def test_an_encoder_layer_becomes_products_norms_and_attention() -> None:
    graph = encoder()
    optimized, _ = optimize(graph)
    assert operators(optimized) == {
        "FusedMatMul": 6,
        "Reshape": 4,
        "FusedAttention": 1,
        "LayerNormalization": 2,
        "ReduceMean": 1,
    }
    assert_same_results(graph, optimized)


def test_one_query_attends_in_one_kernel_on_a_cpu() -> None:
    graph = parse_graph("""graph @g {
      input %q : float32[n,2,1,4]
      input %k : float32[n,2,7,4]
      input %v : float32[n,2,7,4]
      %t : float32[n,2,4,7] = Transpose(%k) {perm = [0, 1, 3, 2]}
      %s : float32[n,2,1,7] = MatMul(%q, %t)
      %p : float32[n,2,1,7] = Softmax(%s)
      %y : float32[n,2,1,4] = MatMul(%p, %v)
      output %y
    }""")
    optimized, _ = optimize(graph)
    assert operators(optimized) == {"FusedAttention": 1}
    assert_same_results(graph, optimized)
    on_gpu, _ = optimize(graph, Options(host=False))
    assert operators(on_gpu) == {"FusedMatMul": 2, "Softmax": 1}


def test_the_bundled_model_is_all_fused() -> None:
    graph = load(DIGITS)
    optimized, _ = optimize(graph)
    assert operators(optimized).keys() <= {"FusedConv", "FusedMatMul", "MaxPool", "PooledConv", "Reshape", "Softmax"}
    assert_same_results(graph, optimized)


def test_names_and_types_of_inputs_and_outputs_do_not_change() -> None:
    graph = image_net()
    optimized, _ = optimize(graph)
    for before, after in ((graph.inputs, optimized.inputs), (graph.outputs, optimized.outputs)):
        assert [(v.name, v.type) for v in before] == [(v.name, v.type) for v in after]


def test_the_callers_graph_is_not_edited() -> None:
    graph = encoder()
    text = print_graph(graph)
    optimize(graph)
    assert print_graph(graph) == text


def test_without_optimization_passes_only_bind_and_clean() -> None:
    prepared, reports = prepare(encoder())
    names = ["bind_params", "fold_constants", "inline_if", "eliminate", "cse", "control"]
    assert [report.name for report in reports] == names
    assert operators(prepared)["MatMul"] == 8
    assert all(len(node.inputs) == 1 for node in prepared.nodes if node.op == "Reshape")


def _nested_branches(depth: int, x: str = "x") -> str:
    """Nodes that give a<depth>: an If of the rank of x, whose branch holds the next one."""
    if depth == 0:
        return f"a0 = Neg({x})"
    inner = _nested_branches(depth - 1, f"u{depth}")
    return (
        f"s{depth} = Shape({x}) r{depth} = Size(s{depth}) c{depth} = Equal(r{depth}, two) "
        f"a{depth} = If(c{depth}) <"
        f"then_branch = t{depth} () => (float[n,4] a{depth - 1}) {{ u{depth} = Neg({x}) {inner} }}, "
        f"else_branch = e{depth} () => (float[] b{depth}) {{ b{depth} = ReduceSum <keepdims = 0> ({x}) }}>"
    )


def test_nested_branches_on_a_known_rank_are_all_removed() -> None:
    """The branch of an inner If is known after the outer If is removed."""
    body = f"{_nested_branches(6)} y = Neg(a6)"
    graph = load(model("float[n,4] x => float[n,4] y", body, "int64 two = {2}"))
    assert "If" not in operators(prepare(graph)[0])


def test_equal_epilogues_have_equal_text_so_that_kernels_are_shared() -> None:
    optimized, _ = optimize(encoder())
    residuals = [node for node in optimized.nodes if node.op == "FusedMatMul" and len(node.inputs) == 4]
    first, second = (print_graph(node.attrs["epilogue"]) for node in residuals)  # type: ignore[arg-type]
    assert first == second


def test_channels_last_can_be_switched_off() -> None:
    optimized, _ = optimize(image_net(), Options(channels_last=False))
    assert operators(optimized)["Conv"] == 4
    assert "Transpose" not in operators(optimized)


def test_nan_and_infinity_propagate() -> None:
    graph = encoder()
    optimized, _ = optimize(graph)
    x = feeds(graph)["x"].astype(np.float32)
    x[0, 0, 0], x[1, 2, 3] = np.nan, np.inf
    with np.errstate(all="ignore"):
        expected, got = interpret(graph, {"x": x})["y"], interpret(optimized, {"x": x})["y"]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_allclose(got[2], expected[2], rtol=1e-4, atol=1e-4)


def test_nodes_that_cannot_be_folded_fail_at_run_time() -> None:
    graph = parse_graph(
        """graph @g {
          input %x : float32[n]
          const %table : float32[2] = [1.0, 2.0]
          const %index : int64[1] = [5]
          %g : float32[1] = Gather(%table, %index) {axis = 0}
          %y : float32[n] = Add(%x, %g)
          output %y
        }"""
    )
    assert operators(optimize(graph)[0]) == {"Gather": 1, "Add": 1}


def test_states_are_preserved() -> None:
    graph = parse_graph(
        """graph @counter {
          input %x : float32[4]
          state %s : float32[4] = [0.0, 0.0, 0.0, 0.0] -> %next
          %a : float32[4] = Identity(%s)
          %y : float32[4] = Add(%x, %a)
          %next : float32[4] = Identity(%y)
          output %y
        }"""
    )
    optimized, _ = optimize(graph)
    assert operators(optimized) == {"Add": 1}
    assert optimized.states[0].update is optimized.outputs[0]


def test_nested_graphs_read_replacements_of_captured_values() -> None:
    graph = parse_graph(
        """graph @g {
          input %x : float32[n,4]
          input %p : bool[]
          %a : float32[n,4] = Identity(%x)
          %b : float32[n,4] = Relu(%a)
          %y : float32[n,4] = If(%p) {else_branch = graph @no {
              %e : float32[n,4] = Neg(%b)
              output %e
            }, then_branch = graph @yes {
              %t : float32[n,4] = Exp(%a)
              output %t
            }}
          output %y
        }"""
    )
    Eliminate().run(graph)
    verify(graph)
    assert operators(graph) == {"Relu": 1, "If": 1}
    assert captures(graph.nodes[1].subgraphs[1]) == [graph.inputs[0]]


@dataclass(frozen=True)
class Breaks:
    """A pass with a bug: its node reads a value that nothing defines."""

    name: str = "breaks"

    def run(self, graph: Graph) -> PassResult:
        ghost = Value("ghost", TensorType(DType.FLOAT32, ()))
        graph.nodes.append(Node("Relu", [ghost], [Value("r", ghost.type)]))
        return PassResult(1)


def test_a_broken_pass_is_named_with_the_passes_before_it() -> None:
    with pytest.raises(PassError, match=r"pass breaks failed .*%ghost.*before it: bind_params, fold_constants"):
        run_passes(image_net(), [BindParams(), FoldConstants(), Breaks()])


def test_reports_list_the_changes() -> None:
    _, reports = optimize(encoder())
    notes = {report.name: report.notes for report in reports if report.notes}
    assert "Gelu: 1" in notes["recompose"]
    assert "LayerNormalization: 2" in notes["recompose"]
    assert all(report.seconds >= 0 and report.nodes_after <= 2 * report.nodes_before for report in reports)


@pytest.mark.parametrize("weight_is_constant", [False, True])
def test_tensors_of_unknown_rank_go_through(weight_is_constant: bool) -> None:
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(DType.FLOAT32, None))
    half = b.constant(np.float32(0.5))
    right = weight(b, 3, 2) if weight_is_constant else b.input("y", TensorType(DType.FLOAT32, None))
    b.graph.outputs = [b("MatMul", b("Mul", x, half), right, name="z")]
    given = {"x": np.ones((2, 3), np.float32), "y": np.ones((3, 2), np.float32)}
    given = {value.name: given[value.name] for value in b.graph.inputs}
    expected = interpret(b.graph, given)
    got = interpret(optimize(b.graph)[0], given)
    for one, other in zip(expected.values(), got.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def _squared(b: Builder) -> Value:
    return b("Pow", b.input("x", TensorType(DType.FLOAT32, None)), b.constant([[2.0]], dtype=DType.FLOAT32))


def _rectified(b: Builder) -> Value:
    return b("Max", b.input("x", TensorType(DType.FLOAT32, None)), b.constant([[0.0]], dtype=DType.FLOAT32))


def _gelu_of_a_matrix(b: Builder) -> Value:
    x, half = b.input("x", TensorType(DType.FLOAT32, None)), b.constant([[0.5]], dtype=DType.FLOAT32)
    error = b("Erf", b("Mul", x, b.constant(np.float32(0.5**0.5))))
    return b("Mul", b("Mul", x, half), b("Add", error, b.constant(np.float32(1))))


@pytest.mark.parametrize("build", [_squared, _rectified, _gelu_of_a_matrix])
def test_constants_may_add_axes_to_values_of_unknown_rank(build: Callable[[Builder], Value]) -> None:
    b = Builder(Graph("net"))
    b.graph.outputs = [build(b)]
    for shape in ((), (3,), (2, 3)):
        given = {"x": RNG.standard_normal(shape).astype(np.float32)}
        (expected,), (got,) = interpret(b.graph, given).values(), interpret(optimize(b.graph)[0], given).values()
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", range(8))
def test_a_quantized_product_of_unknown_ranks_goes_through(hidden: int) -> None:
    scale, zero = np.float32(0.5), np.uint8(3)
    operands = [np.arange(6, dtype=np.uint8).reshape(2, 3), np.arange(12, dtype=np.uint8).reshape(3, 4)]
    given = [operands[0], scale, zero, operands[1], scale, zero, scale, zero]
    b = Builder(Graph("net"))
    name = f"x{hidden}"
    values = [
        b.input(name, TensorType(DType.from_numpy(array.dtype), None)) if index == hidden else b.constant(array)
        for index, array in enumerate(given)
    ]
    b.graph.outputs = [b("QLinearMatMul", *values, name="y")]
    feed = {name: np.asarray(given[hidden])}
    np.testing.assert_array_equal(interpret(optimize(b.graph)[0], feed)["y"], interpret(b.graph, feed)["y"])


def test_array_feature_extractor_of_unknown_rank() -> None:
    b = Builder(Graph("net"))
    x = b.input("x", TensorType(DType.FLOAT32, None))
    b.graph.outputs = [b("ArrayFeatureExtractor", x, b.constant(np.int64([2, 0])), name="y")]
    given = {"x": RNG.standard_normal((2, 3)).astype(np.float32)}
    np.testing.assert_array_equal(interpret(optimize(b.graph)[0], given)["y"], given["x"][:, [2, 0]])
