"""Model-local functions: nested, with attributes by reference, overloaded, with opsets of their own, inside bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.frontends.export import export
from lathe.core.frontends.onnx import load
from lathe.core.ir.equality import difference
from tests.core.frontends.models import assert_agree, floats, model, ours

N = helper.make_node
LOCAL = {"local": 1}


def function(
    name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str] = ("a",), outputs: Sequence[str] = ("b",),
    *, attributes: Sequence[str] = (), defaults: Sequence[onnx.AttributeProto] = (), opset: int = 21,
    overload: str = "",
) -> onnx.FunctionProto:  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    made = helper.make_function(
        "local", name, inputs, outputs, nodes, imports, list(attributes), attribute_protos=list(defaults)
    )
    made.overload = overload
    return made


def referring(node: onnx.NodeProto, name: str, to: str, kind: int) -> onnx.NodeProto:
    """The node with an attribute that is the calling node's attribute `to`."""
    node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=to, type=kind))
    return node


def calling(name: str, *functions: onnx.FunctionProto, opset: int = 21, **attrs: Any) -> onnx.ModelProto:
    node = N(name, ["x"], ["y"], domain="local", **attrs)
    return model([node], {"x": [2, 3]}, functions=functions, domains=LOCAL, opset=opset)


def test_attributes_go_down_through_functions_that_call_functions() -> None:
    leaf = function("Leaf", [referring(N("LeakyRelu", ["a"], ["b"]), "alpha", "slope", 1)], attributes=["slope"])
    middle = function(
        "Middle", [referring(N("Leaf", ["a"], ["b"], domain="local"), "slope", "s", 1)],
        defaults=[helper.make_attribute("s", 0.5)],
    )  # fmt: skip
    for given, slope in (({}, 0.5), ({"s": 0.25}, 0.25)):
        proto = calling("Middle", leaf, middle, **given)
        x = floats(2, 3)
        np.testing.assert_allclose(ours(proto, {"x": x})["y"], np.where(x < 0, slope * x, x), 1e-6)
        assert_agree(proto, {"x": x})


def test_lists_text_and_tensors_by_reference() -> None:
    perm = referring(N("Transpose", ["a"], ["t"]), "perm", "order", 7)
    const = referring(N("Constant", [], ["c"]), "value", "bias", 4)
    gelu = referring(N("Gelu", ["t"], ["g"]), "approximate", "how", 3)
    body = function("Mix", [perm, const, gelu, N("Add", ["g", "c"], ["b"])], attributes=["order", "bias", "how"])
    bias = onnx.numpy_helper.from_array(np.float32([1, 2]))
    assert_agree(calling("Mix", body, order=[1, 0], bias=bias, how="tanh"), {"x": floats(2, 3)})


def test_a_reference_to_a_missing_attribute_omits_it() -> None:
    body = function("F", [referring(N("LeakyRelu", ["a"], ["b"]), "alpha", "slope", 1)], attributes=["slope"])
    x = floats(2, 3)
    np.testing.assert_allclose(ours(calling("F", body), {"x": x})["y"], np.where(x < 0, 0.01 * x, x), 1e-6)


def test_overloads_are_functions_of_their_own() -> None:
    functions = [function("F", [N(op, ["a"], ["b"])], overload=name) for op, name in (("Neg", ""), ("Exp", "grow"))]
    x = floats(2, 3)
    for overload, expected in (("", -x), ("grow", np.exp(x))):
        proto = calling("F", *functions, overload=overload)
        np.testing.assert_allclose(ours(proto, {"x": x})["y"], expected, 1e-6)
    with pytest.raises(ModelError, match="operator F of domain 'local'"):
        load(calling("F", *functions, overload="other").SerializeToString())


def test_a_function_has_opsets_of_its_own() -> None:
    """Axes were an attribute before opset 13; the calling model has a newer opset."""
    body = function("F", [N("ReduceSum", ["a"], ["s"], axes=[1], keepdims=0), N("Neg", ["s"], ["b"])], opset=11)
    x = floats(2, 3)
    np.testing.assert_allclose(ours(calling("F", body), {"x": x})["y"], -x.sum(axis=1), 1e-5)


def test_functions_inside_bodies_read_only_their_arguments() -> None:
    body = function("Twice", [N("Add", ["a", "a"], ["b"])])
    branches = [
        helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=name)])
        for name, nodes in (("t", [N("Twice", ["x"], ["t"], domain="local")]), ("e", [N("Neg", ["x"], ["e"])]))
    ]
    nodes = [N("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1])]
    proto = model(nodes, {"x": [3]}, constants={"flag": np.array(True)}, functions=[body], domains=LOCAL)
    assert_agree(proto, {"x": floats(3)})
    thief = function("Twice", [N("Add", ["a", "x"], ["b"])])  # x belongs to the graph that calls it
    stolen = model(nodes, {"x": [3]}, constants={"flag": np.array(True)}, functions=[thief], domains=LOCAL)
    with pytest.raises(ModelError, match="reads 'x', which nothing defines"):
        load(stolen.SerializeToString())


def test_bodies_inside_functions_see_its_arguments_and_attributes() -> None:
    inner = referring(N("LeakyRelu", ["a"], ["t"]), "alpha", "slope", 1)
    branches = [
        helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=name)])
        for name, nodes in (("t", [inner]), ("e", [N("Neg", ["a"], ["e"])]))
    ]
    choice = N("If", ["positive"], ["b"], then_branch=branches[0], else_branch=branches[1])
    nodes = [N("ReduceSum", ["a"], ["s"], keepdims=0), N("Constant", [], ["zero"], value_float=0.0),
             N("Greater", ["s", "zero"], ["positive"]), choice]  # fmt: skip
    proto = calling("F", function("F", nodes, attributes=["slope"]), slope=0.5)
    for sign in (1, -1):
        assert_agree(proto, {"x": np.float32([[1, -2, 3], [4, 5, -6]]) * sign})


def test_unused_outputs_and_missing_arguments_of_calls() -> None:
    nodes = [N("Clip", ["a", "low", "high"], ["b"]), N("Neg", ["a"], ["c"])]
    body = function("F", nodes, ["a", "low", "high"], ["b", "c"])
    call = N("F", ["x", "", "one"], ["", "y"], domain="local")
    proto = model([call], {"x": [4]}, constants={"one": np.float32(1)}, functions=[body], domains=LOCAL)
    np.testing.assert_array_equal(ours(proto, {"x": np.float32([1, 2, 3, 4])})["y"], [-1, -2, -3, -4])


def test_a_function_takes_the_place_of_an_operator_of_its_name() -> None:
    body = helper.make_function("", "Relu", ["a"], ["b"], [N("Neg", ["a"], ["b"])], [helper.make_opsetid("", 21)])
    proto = model([N("Relu", ["x"], ["y"])], {"x": [2]}, functions=[body])
    np.testing.assert_array_equal(ours(proto, {"x": np.float32([1, -2])})["y"], [-1, 2])


def test_unfolded_models_survive_the_round_trip() -> None:
    leaf = function("Leaf", [N("Exp", ["a"], ["t"]), N("Add", ["t", "a"], ["b"])])
    twice = function("Twice", [N("Leaf", ["a"], ["t"], domain="local"), N("Leaf", ["t"], ["b"], domain="local")])
    graph = load(calling("Twice", leaf, twice).SerializeToString())
    assert len(graph.nodes) == 4
    assert difference(graph, load(export(graph))) == ""


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 4, 24)])
def test_a_definition_by_the_rank_of_its_input_chooses_when_it_runs(shape: tuple[int, ...], interleaved: int) -> None:
    node = helper.make_node("RotaryEmbedding", ["x", "c", "s", "p"], ["y"], num_heads=3, interleaved=interleaved)
    constants = {"c": floats(10, 4), "s": floats(10, 4, seed=1), "p": np.tile(np.arange(4), (2, 1))}
    assert_agree(model([node], {"x": None}, constants=constants, opset=23), {"x": floats(*shape)})


def test_a_rank_without_a_definition_is_refused_at_run_time() -> None:
    node = helper.make_node("RotaryEmbedding", ["x", "c", "s"], ["y"])
    proto = model([node], dict.fromkeys("xcs"), opset=23)
    with pytest.raises(FeedError, match=r"cannot give 2 elements of shape \[2\] the shape \[4\]"):
        ours(proto, {"x": floats(2, 4), "c": floats(2, 4, 2), "s": floats(2, 4, 2)})


def test_a_definition_that_does_not_apply_is_not_called_unknown() -> None:
    node = helper.make_node("LinearAttention", list("qkv"), ["y", "state"])
    proto = model([node], dict.fromkeys("qkv"), opset=27)
    with pytest.raises(UnsupportedError, match=r"ONNX has no definition of it for inputs float32\[\*\]"):
        load(proto.SerializeToString())


@pytest.mark.parametrize("hidden", ["x", "w", "b", "p", "xwbp"])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_a_causal_convolution_of_unknown_shapes(activation: str, hidden: str) -> None:
    """Without shapes Lathe builds other nodes than ONNX's function body; both must give the same results."""
    node = helper.make_node("CausalConvWithState", list("xwbp"), ["y", "state"], activation=activation)
    given = {"x": floats(2, 3, 5), "w": floats(3, 1, 4), "b": floats(3), "p": floats(2, 3, 3)}
    known = {name: array.shape for name, array in given.items()}
    shapes = {name: None if name in hidden else shape for name, shape in known.items()}
    expected, got = (ours(model([node], each, ("y", "state"), opset=27), given) for each in (known, shapes))
    for name, array in expected.items():
        assert got[name].shape == array.shape
        np.testing.assert_allclose(got[name], array, 1e-6, 1e-6)


def test_a_causal_convolution_without_a_state_begins_with_zeros() -> None:
    node = helper.make_node("CausalConvWithState", ["x", "w"], ["y", "state"])
    given = {"x": floats(2, 3, 5), "w": floats(3, 1, 4)}
    known = {name: array.shape for name, array in given.items()}
    expected, got = (
        ours(model([node], each, ("y", "state"), opset=27), given) for each in (known, dict.fromkeys(known))
    )
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, 1e-6, 1e-6)
