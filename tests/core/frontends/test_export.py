"""Exported files import as the same graph, and agree with ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import lathe
from lathe.core.errors import UnsupportedError
from lathe.core.frontends.decompositions import has_decomposition
from lathe.core.frontends.export import export
from lathe.core.frontends.onnx import load
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.equality import difference
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.text import parse_graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.passes.pipeline import Options, optimize
from lathe.core.reference import interpret
from loadtest import zoo
from tests.core.frontends.models import floats, model, theirs
from tests.core.small_models import model as parsed
from tests.onnx_runtime import SEVEN_BITS

N = helper.make_node


def small() -> onnx.ModelProto:
    """A convolution, parameters as inputs, an absent input, strings of attributes, and a branch."""
    then = helper.make_graph([N("Neg", ["p"], ["t"])], "then", [], [onnx.ValueInfoProto(name="t")])
    other = helper.make_graph([N("Exp", ["p"], ["u"])], "else", [], [onnx.ValueInfoProto(name="u")])
    nodes = [
        N("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1], auto_pad="NOTSET"),
        N("Clip", ["h", "", "one"], ["c"]),
        N("ReduceMean", ["c", "axes"], ["p"], keepdims=0),
        N("If", ["flag"], ["y"], then_branch=then, else_branch=other),
    ]
    constants = {"w": floats(4, 3, 3, 3), "one": np.float32(1), "axes": np.int64([2, 3]), "flag": np.array(True)}
    return model(nodes, {"x": ["n", 3, 5, 5]}, constants=constants, opset=18)


def test_round_trip() -> None:
    graph = load(small().SerializeToString())
    data = export(graph)
    onnx.checker.check_model(onnx.ModelProto.FromString(data))
    assert str(load(data)) == str(graph)


def test_onnx_runtime_runs_exported_models() -> None:
    x = floats(2, 3, 5, 5)
    again = onnx.ModelProto.FromString(export(load(small().SerializeToString()), opset=22))
    np.testing.assert_allclose(theirs(again, {"x": x})["y"], theirs(small(), {"x": x})["y"], 1e-5)


def built(op: str, **attrs: object) -> Graph:
    graph = Graph()
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 4, 6, 4)))
    graph.outputs = [b(op, x, **attrs)]  # type: ignore[arg-type]
    return graph


def test_parameters_that_became_attributes_are_inputs_again() -> None:
    again = load(export(built("Reshape", shape=(-1, 24))))
    (shape,) = again.constants.values()
    np.testing.assert_array_equal(shape, [-1, 24])
    assert str(again.outputs[0].type) == "float32[4*n,24]"


def test_graphs_without_an_onnx_form_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="depends on 'm', which is no dimension of any value"):
        export(built("Reshape", shape=(symbol("n"), symbol("m"))))
    with pytest.raises(UnsupportedError, match=r"\(Swish\): opset 21 of domain 'ai.onnx' does not have it"):
        export(built("Swish"), opset=21)


def test_the_opset_is_the_oldest_that_has_all_operators_as_they_are() -> None:
    assert opset_of(export(built("Relu"))) == 21
    assert opset_of(export(built("Swish"))) == 24
    assert opset_of(export(built("Relu"), opset=17)) == 17


@pytest.mark.parametrize(("dtype", "fmod", "opset"), [(1, 0, 28), (1, 1, 21), (7, 0, 21), (7, 1, 21)])
def test_floored_remainders_of_floats_need_opset_28(dtype: int, fmod: int, opset: int) -> None:
    ports = [helper.make_tensor_value_info(name, dtype, ["n"]) for name in "abc"]
    node = helper.make_node("Mod", ["a", "b"], ["c"], fmod=fmod)
    graph = helper.make_graph([node], "remainder", ports[:2], ports[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)])
    assert opset_of(export(load(model.SerializeToString()))) == opset


def opset_of(data: bytes) -> int:
    (entry,) = onnx.ModelProto.FromString(data).opset_import
    return int(entry.version)


def test_every_operator_made_by_passes_exports() -> None:
    """Except those of packed sequences, of caches, and of models under compression, which are replaced first."""
    own = [name for name in registry.names() if registry.get(name).domain == "lathe"]
    packed = {"SegmentAttention", "SegmentReduce", "SegmentSoftmax"}
    cached = {"CacheWrite", "CachedAttention"}
    under_training = {"FakeQuantize", "CodedWeight", "MaskedWeight"}
    assert {name for name in own if not has_decomposition(name)} == packed | cached | under_training


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("to", [None, DType.FLOAT16])
def test_packed_images_agree_with_onnx_runtime(block: int, layout: str, to: DType | None) -> None:
    shape = (2, 3, 4, 6) if layout == "NCHW" else (2, 4, 6, 3)
    graph = Graph("images")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, shape))
    graph.outputs = [b("PackImage", x, channels=4, block=block, layout=layout, to=to)]
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    [expected] = interpret(graph, feeds).values()
    [got] = theirs(onnx.ModelProto.FromString(export(graph)), feeds).values()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["lenet", "mobilenet", "transformer"])
def test_optimized_models_agree_with_onnx_runtime(name: str) -> None:
    proto = zoo.model(name)
    optimized, _ = optimize(load(proto.SerializeToString()))
    assert any(registry.get(node.op).domain == "lathe" for node in optimized.nodes)
    data = export(optimized)
    onnx.checker.check_model(onnx.ModelProto.FromString(data))
    x = zoo.sample(name, 3)
    want = theirs(proto, {"x": x})["y"]
    got = theirs(onnx.ModelProto.FromString(data), {"x": x})["y"]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_integers_computed_from_sizes() -> None:
    text = """
        graph @g {
          input %x : int64[n,4]
          %a : int64[3,n] = Iota() {dtype = type int64, shape = [3, n], start = n+1, steps = [n, -2]}
          %b : int64[] = Iota() {dtype = type int64, shape = [], start = 2*n, steps = []}
          %c : int32[1,4] = Iota() {dtype = type int32, shape = [1, 4], start = 0, steps = [0, 1]}
          %d : int64[n,4] = Add(%x, %b)
          output %a, %b, %c, %d
        }"""
    graph, feeds = parse_graph(text), {"x": np.zeros((5, 4), np.int64)}
    got = theirs(onnx.load_from_string(export(graph)), feeds)
    for name, want in interpret(graph, feeds).items():
        np.testing.assert_array_equal(got[name], want, strict=True)


@pytest.mark.parametrize("op", ["GlobalMaxPool", "GlobalAveragePool", "InstanceNormalization"])
def test_channels_last_operators_get_transposes(op: str) -> None:
    graph = Graph()
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 6, 4, 5)))
    scale = [b.constant(floats(5)), b.constant(floats(5))] if op == "InstanceNormalization" else []
    graph.outputs = [b(op, x, *scale, layout="NHWC")]
    feeds = {"x": floats(2, 6, 4, 5)}
    (want,), (got,) = interpret(graph, feeds).values(), theirs(onnx.load_from_string(export(graph)), feeds).values()
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_products_of_bfloat16(name: str) -> None:
    optimized, _ = optimize(load(zoo.model(name).SerializeToString()), Options(precision="bfloat16"))
    assert DType.BFLOAT16 in {value.dtype for node in optimized.nodes for value in node.outputs}
    data, x = export(optimized), zoo.sample(name, 2)
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    want, got = interpret(optimized, {"x": x})["y"], interpret(load(data), {"x": x})["y"]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_products_of_bytes(layout: str) -> None:
    rng = np.random.default_rng(0)
    graph = Graph()
    b = Builder(graph)
    x = b.input("x", TensorType(DType.UINT8, (symbol("n"), 5, 5, 5)))
    weight = b.constant(rng.integers(-SEVEN_BITS, SEVEN_BITS + 1, (3, 5, 3, 3)), dtype=DType.INT8)
    bias = b.constant([7, -7, 100], dtype=DType.INT32)
    image = b("FusedConv", x, weight, bias, pads=(1, 1, 1, 1), pad_value=128, layout=layout)
    rows = b.input("rows", TensorType(DType.UINT8, (symbol("n"), 6)))
    product = b("FusedMatMul", rows, b.constant(rng.integers(-SEVEN_BITS, SEVEN_BITS + 1, (6, 4)), dtype=DType.INT8))
    graph.outputs = [image, product]
    shapes = {"x": (2, 5, 5, 5), "rows": (2, 6)}
    feeds = {name: rng.integers(0, 255, shape).astype(np.uint8) for name, shape in shapes.items()}
    want, got = interpret(graph, feeds), theirs(onnx.load_from_string(export(graph)), feeds)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


def test_parameters_that_depend_on_symbols_are_computed() -> None:
    n = symbol("n")
    graph = Graph()
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (n, 4)))
    graph.outputs = [b("Slice", x, starts=((n - 3) // 2,), ends=(2 * n * n + 1,), axes=(0,))]
    again = onnx.load_from_string(export(graph))
    for rows in (2, 3, 8):  # for two rows the start, (2 - 3) // 2, is -1: the last row
        feeds = {"x": floats(rows, 4)}
        (want,), (got,) = interpret(graph, feeds).values(), theirs(again, feeds).values()
        np.testing.assert_array_equal(got, want)


def test_scalar_parameters_have_the_type_of_the_data() -> None:
    graph = Graph()
    b = Builder(graph)
    x = b.input("x", TensorType(DType.INT32, (4,)))
    graph.outputs = [b("Pad", b("Clip", x, min=(-1,), max=(2,)), pads=(1, 1), constant_value=(7,))]
    (y,) = theirs(onnx.load_from_string(export(graph)), {"x": np.int32([-5, 0, 1, 9])}).values()
    assert y.tolist() == [7, -1, 0, 1, 2, 7]


def test_state_is_an_input_with_a_default_and_an_output() -> None:
    graph = Graph()
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (2,)))
    total = Value("total", TensorType(DType.FLOAT32, (2,)))
    graph.outputs = [b("Neg", x, name="y")]
    graph.states = [State(total, b("Add", total, x, name="next"), np.float32([1, 2]))]
    again = onnx.load_from_string(export(graph))
    onnx.checker.check_model(again)
    x_value = np.float32([3, 4])
    assert theirs(again, {"x": x_value})["next"].tolist() == [4, 6]
    assert theirs(again, {"x": x_value, "total": np.float32([10, 10])})["next"].tolist() == [13, 14]


def test_nodes_of_one_name_get_names_of_their_own() -> None:
    """ONNX lets a name recur; ONNX Runtime does not."""
    proto = model([N("Neg", ["x"], ["h"], name="twin"), N("Neg", ["h"], ["y"], name="twin")], {"x": [2]})
    graph = load(proto.SerializeToString())
    assert [node.name for node in graph.nodes] == ["twin", "twin_2"]
    data = export(graph)
    assert difference(graph, load(data)) == ""
    assert theirs(onnx.load_from_string(data), {"x": np.float32([1, 2])})["y"].tolist() == [1, 2]


def test_differences_are_found() -> None:
    def graph(op: str = "Relu", weight: float = 1.0) -> Graph:
        weights = np.full((3, 40), weight, np.float32)
        return load(model([N("Add", ["x", "w"], ["h"]), N(op, ["h"], ["y"])], {"x": [3, 40]}, constants={"w": weights})
                    .SerializeToString())  # fmt: skip

    assert difference(graph(), graph()) == ""
    assert "Relu" in difference(graph(), graph("Neg")) and "Neg" in difference(graph(), graph("Neg"))
    assert difference(graph(), graph(weight=1.0000001)) == "the bytes of a constant"


def test_fused_results_of_an_extent_that_no_input_has() -> None:
    """The extent of both results is known only at run time; symbols keep their names."""
    data = parsed(
        "float[K] x, int64[1] end => float[] y, float[] z",
        "part = Slice (x, zero, end)  more = Slice (x, one, end)  t = Add (part, more)  y = Tanh (t)  z = Exp (y)",
        "int64[1] zero = {0}, int64[1] one = {1}",
    )
    graph = load(data)
    assert difference(graph, load(export(graph))) == ""
    feeds = {"x": np.arange(4, dtype=np.float32), "end": np.int64([2])}
    exported = lathe.compile(export(optimize(graph)[0]), tune="off").run(feeds)
    for name, expected in lathe.compile(data, tune="off").run(feeds).items():
        np.testing.assert_allclose(exported[name], expected, 1e-6)
