"""The ONNX importer: files and the graphs that they become."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from lathe.core.errors import ModelError, ShapeWarning, UnsupportedError
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import parse_graph
from lathe.core.ops.opdef.inference import infer_graph
from tests.core.frontends.models import assert_agree, floats, model, ours

N = helper.make_node


def imported(*nodes: onnx.NodeProto, **options: object) -> Graph:
    return load(model(nodes, **{"inputs": {"x": ["n", 4]}, **options}).SerializeToString())  # type: ignore[arg-type]


def test_a_path_and_its_bytes_give_the_same_graph(tmp_path: Path) -> None:
    proto = model([N("Relu", ["x"], ["y"])], {"x": ["n", 4]})
    onnx.save(proto, tmp_path / "m.onnx")
    graph = load(tmp_path / "m.onnx")
    assert str(graph) == str(load(proto.SerializeToString()))
    assert str(graph) == 'graph @g {\n  input %x : float32[n,4]\n  %y : float32[n,4] = Relu(%x) "y"\n  output %y\n}\n'


def test_dimensions() -> None:
    graph = imported(
        N("Relu", ["x"], ["y"]), inputs={"x": ["batch size", None, -1, 0, 7, "batch size", "lambda", "inf"]}
    )
    assert str(graph.inputs[0].type) == "float32[batch_size,x_dim1,x_dim2,0,7,batch_size,lambda_,inf_]"


def test_names_that_differ_only_in_special_characters_stay_distinct() -> None:
    graph = imported(N("Relu", ["x"], ["y"]), inputs={"x": ["a b", "a_b", "a-b"]})
    assert len(set(graph.inputs[0].shape)) == 3


def test_a_shape_need_not_be_declared() -> None:
    assert str(imported(N("Relu", ["x"], ["y"]), inputs={"x": None}).outputs[0].type) == "float32[*]"


def test_nodes_are_put_in_order() -> None:
    nodes = [N("Add", ["a", "b"], ["y"]), N("Relu", ["a"], ["b"]), N("Neg", ["x"], ["a"])]
    assert [node.op for node in imported(*nodes).nodes] == ["Neg", "Relu", "Add"]


def test_an_initializer_that_is_also_an_input_is_a_constant() -> None:
    graph = imported(N("Add", ["x", "w"], ["y"]), inputs={"x": ["n", 4], "w": [4]}, constants={"w": floats(4)})
    assert [value.name for value in graph.inputs] == ["x"]
    assert [value.name for value in graph.constants] == ["w"]


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ({"value": onnx.numpy_helper.from_array(np.array([1, 2], np.int8))}, np.array([1, 2], np.int8)),
        ({"value_float": 1.5}, np.float32(1.5)),
        ({"value_floats": [1.5, 2]}, np.array([1.5, 2], np.float32)),
        ({"value_int": 3}, np.int64(3)),
        ({"value_ints": [3, 4]}, np.array([3, 4])),
        ({"value_string": "a"}, np.array("a", object)),
        ({"value_strings": ["a", "b"]}, np.array(["a", "b"], object)),
    ],
)
def test_constant_nodes_become_constants(attrs: dict[str, object], expected: np.ndarray) -> None:
    graph = imported(N("Constant", [], ["y"], **attrs))
    (array,) = graph.constants.values()
    assert graph.nodes == []
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(array, expected)


def test_trailing_and_unused_outputs() -> None:
    graph = imported(N("Dropout", ["x"], ["y", ""]), N("MaxPool", ["z"], ["p", ""], kernel_shape=[2]),
                     inputs={"x": [2], "z": [1, 1, 4]})  # fmt: skip
    assert [len(node.outputs) for node in graph.nodes] == [1, 1]


def test_declared_outputs_must_not_contradict() -> None:
    """A contradicting shape gives a warning, as in ONNX Runtime, and the shape that the nodes compute counts."""
    proto = model([N("Relu", ["x"], ["y"])], {"x": ["n", 4]})
    message = r"output 'y': is declared .*, its nodes make it float32\[n,4\]"
    for shape in ([None, 5], ["n"]):
        proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, shape))
        with pytest.warns(ShapeWarning, match=message):
            assert str(load(proto.SerializeToString()).outputs[0].type) == "float32[n,4]"
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.INT32, ["n", 4]))
    with pytest.raises(ModelError, match=message):
        load(proto.SerializeToString())
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, ["other", 4]))
    assert str(load(proto.SerializeToString()).outputs[0].type) == "float32[n,4]"


def test_declared_shapes_help_where_inference_knows_no_rank() -> None:
    proto = model([N("Relu", ["x"], ["h"]), N("Neg", ["h"], ["y"])], {"x": None})
    proto.graph.value_info.append(helper.make_tensor_value_info("h", 1, ["n", 3]))
    assert str(load(proto.SerializeToString()).outputs[0].type) == "float32[_n,3]"  # no input has a dimension n


def test_declared_shapes_outlive_inference() -> None:
    """The server infers types again after another process has parsed the model."""
    shaped = [N("NonZero", ["x"], ["i"]), N("Squeeze", ["i"], ["s"]), N("Reshape", ["x", "s"], ["h"])]
    proto = model([*shaped, N("Neg", ["h"], ["y"])], {"x": [6]})
    proto.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [2, 3]))
    graph = load(proto.SerializeToString())
    infer_graph(graph)
    assert graph.outputs[0].shape == (2, 3)


def test_the_declared_type_of_an_output_reaches_its_readers() -> None:
    nodes = [
        N("NonZero", ["x"], ["i"]),
        N("Squeeze", ["i"], ["s"]),
        N("Reshape", ["x", "s"], ["y"]),
        N("Neg", ["y"], ["z"]),
    ]
    proto = model(nodes, {"x": [6]}, outputs=["y", "z"])
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3]))
    assert [value.shape for value in load(proto.SerializeToString()).outputs] == [(2, 3), (2, 3)]


def test_symbols_of_such_names_stay_distinct() -> None:
    names = ["a.b", "a_b", "3"]
    graph = imported(*(N("NonZero", ["x"], [name]) for name in names), outputs=names)
    lengths = [str(value.shape[1]) for value in graph.outputs]
    assert len(set(lengths)) == 3
    assert all(length.isidentifier() for length in lengths)


def double() -> onnx.FunctionProto:
    """local.Scale(a, b?) = (a + a) * factor, with factor 2 unless given; b is never read."""
    nodes = [N("Constant", [], ["f"]), N("Add", ["a", "a"], ["t"]), N("Mul", ["t", "f"], ["out"])]
    nodes[0].attribute.append(onnx.AttributeProto(name="value_float", ref_attr_name="factor", type=1))
    return helper.make_function(
        "local", "Scale", ["a", "b"], ["out"], nodes, [helper.make_opsetid("", 17)],
        attribute_protos=[helper.make_attribute("factor", 2.0)],
    )  # fmt: skip


def test_functions_are_unfolded() -> None:
    calls = [N("Scale", ["x"], ["h"], "one", domain="local"), N("Scale", ["h"], ["y"], domain="local", factor=3.0)]
    proto = model(calls, {"x": ["n", 4]}, functions=[double()], domains={"local": 1})
    assert_agree(proto, {"x": floats(2, 4)})
    graph = load(proto.SerializeToString())
    assert [node.op for node in graph.nodes] == ["Add", "Mul", "Add", "Mul"]
    assert [node.outputs[0].name for node in graph.nodes] == ["one/t", "h", "y/t", "y"]


def test_a_function_that_passes_its_argument_through() -> None:
    function = helper.make_function("local", "Same", ["a"], ["a"], [], [helper.make_opsetid("", 17)])
    proto = model([N("Same", ["x"], ["y"], domain="local")], {"x": [2]}, functions=[function], domains={"local": 1})
    assert ours(proto, {"x": floats(2)}).keys() == {"y"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            N("Scale", ["x", "x", "x"], ["y"], domain="local"),
            "has \\(inputs, outputs\\) \\(3, 1\\), expected at most \\(2, 1\\)",
        ),
        (N("Scale", ["x"], ["y"], domain="local", speed=1), "has attribute speed, expected only factor"),
        (N("Scale", [], ["y"], domain="local"), "node 'y/t' \\(Add, opset 17\\)"),
    ],
)
def test_calls_that_do_not_fit(call: onnx.NodeProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model([call], {"x": [2]}, functions=[double()], domains={"local": 1}).SerializeToString())


def test_functions_that_call_themselves() -> None:
    nodes = [N("Loop2", ["a"], ["b"], domain="local")]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Loop2", ["a"], ["b"], nodes, imports)
    proto = model([N("Loop2", ["x"], ["y"], domain="local")], {"x": [2]}, functions=[function], domains={"local": 1})
    with pytest.raises(UnsupportedError, match="functions call each other more than 32 deep"):
        load(proto.SerializeToString())


def test_functions_cannot_unfold_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty functions, each calling the one before ten times: 10**30 nodes in a few kilobytes."""
    monkeypatch.setattr("lathe.core.frontends.scope.MAX_NODES", 2000)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    functions = [helper.make_function("local", "f0", ["a"], ["b"], [N("Identity", ["a"], ["b"])], imports)]
    for i in range(1, 30):
        calls = [N(f"f{i - 1}", ["a"], [f"b{k}"], domain="local") for k in range(10)]
        functions.append(helper.make_function("local", f"f{i}", ["a"], ["b0"], calls, imports))
    proto = model([N("f29", ["x"], ["y"], domain="local")], {"x": [2]}, functions=functions, domains={"local": 1})
    with pytest.raises(UnsupportedError, match="more than 2000 nodes"):
        load(proto.SerializeToString())


def test_operators_defined_by_others_are_unfolded() -> None:
    """CenterCropPad has no definition in Lathe: the import uses its function body from the ONNX standard."""
    proto = model([N("CenterCropPad", ["x", "s"], ["y"])], {"x": [5, 7]}, constants={"s": np.array([3, 9])})
    graph = load(proto.SerializeToString())
    assert "CenterCropPad" not in {node.op for node in graph.nodes}
    assert_agree(proto, {"x": floats(5, 7)})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            N("Frobnicate", ["x"], ["y"], "n1"),
            r"node 'n1' \(Frobnicate\): operator Frobnicate of domain 'ai.onnx', opset 21",
        ),
        (
            N("Relu", ["x"], ["y"], "n1", domain="com.acme"),
            "operator Relu of domain 'com.acme', opset 3 is not implemented",
        ),
        (N("Relu", ["x"], ["y"], domain="nowhere"), "of domain 'nowhere', of which the model imports no opset"),
        (N("FusedMatMul", ["x", "x"], ["y"], domain="lathe"), "domain 'lathe', opset 1 is not implemented"),
        (N("FusedMatMul", ["x", "x"], ["y"]), "operator FusedMatMul of domain 'ai.onnx'"),
        (N("Relu", ["x"], ["y"], slope=1), "has attribute 'slope', expected only none"),
        (N("MaxPool", ["x"], ["y"], kernel_shape=[2], layout="NHWC"), "has attribute 'layout', expected only"),
        (N("Add", ["x"], ["y"]), r"node 'y' \(Add, opset 21\): has 1 inputs, expected 2"),
        (N("Relu", ["q"], ["y"]), "reads 'q', which nothing defines"),
        (N("Constant", [], ["y"]), "has 0 attributes and 1 outputs, expected one each"),
        (
            N("Concat", ["x"], ["y"], axis="first"),
            r"node 'y' \(Concat, opset 21\): attribute 'axis' is 'first', expected INT",
        ),
        (N("Conv", ["x", "x"], ["y"], pads=[1.5]), "attribute 'pads' is \\(1.5,\\), expected INTS"),
        (N("Softmax", ["x"], ["y"], axis="first"), "opset 21"),
    ],
)
def test_nodes_that_cannot_be_imported(node: onnx.NodeProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model([node], {"x": [4, 4]}, domains={"com.acme": 3, "lathe": 1}).SerializeToString())


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=nodes[-1].output[0])])


@pytest.mark.parametrize("taken", [True, False])
def test_branches_read_the_graph_around_them(taken: bool) -> None:
    """Both branches call their result `t`, one hides the outer `h`, and a branch has a branch of its own."""
    inner = N("If", ["flag"], ["t"], then_branch=branch("a", N("Neg", ["h"], ["u"])),
              else_branch=branch("b", N("Abs", ["h"], ["u"])))  # fmt: skip
    then, other = branch("then", N("Exp", ["h"], ["k"]), N("Add", ["k", "h"], ["t"])), branch("else", inner)
    nodes = [N("Relu", ["x"], ["h"]), N("If", ["flag"], ["y"], then_branch=then, else_branch=other)]
    proto = model(nodes, {"x": [2, 3]}, constants={"flag": np.array(taken)})
    assert_agree(proto, {"x": floats(2, 3)})
    assert parse_graph(str(load(proto.SerializeToString()))).nodes[1].subgraphs


def test_loops() -> None:
    """A running sum over four rounds that reads the outer x; the body's inputs get their types from the loop's."""
    body = helper.make_graph(
        [N("Add", ["s", "x"], ["s2"]), N("Identity", ["c"], ["c2"]), N("Mul", ["s2", "s2"], ["scan"])], "body",
        [onnx.ValueInfoProto(name=name) for name in ("i", "c", "s")],
        [onnx.ValueInfoProto(name=name) for name in ("c2", "s2", "scan")],
    )  # fmt: skip
    nodes = [N("Loop", ["trips", "", "x"], ["y", "ys"], body=body)]
    proto, x = model(nodes, {"x": [2, 3]}, ["y", "ys"], constants={"trips": np.int64(4)}), floats(2, 3)
    result = ours(proto, {"x": x})
    np.testing.assert_allclose(result["y"], 5 * x, 1e-6)
    np.testing.assert_allclose(result["ys"], np.stack([(k * x) ** 2 for k in range(2, 6)]), 1e-5)


def test_graphs_cannot_nest_without_end() -> None:
    node = N("Neg", ["x"], ["t"])
    for _ in range(9):
        node = N("If", ["flag"], ["t"], then_branch=branch("a", node), else_branch=branch("b", N("Neg", ["x"], ["t"])))
    proto = model([node, N("Neg", ["t"], ["y"])], {"x": [2]}, constants={"flag": np.array(True)})
    with pytest.raises(UnsupportedError, match="graphs are nested more than 8 deep"):
        load(proto.SerializeToString())
