"""Error messages name the node, its opset, its inputs, and the producers of those."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.onnx import load
from tests.core.frontends.models import floats, model

N = helper.make_node


def printed(proto: onnx.ModelProto) -> str:
    with pytest.raises(ModelError) as caught:
        load(proto.SerializeToString())
    return str(caught.value)


def test_shapes_that_do_not_fit_show_the_path_of_each_value() -> None:
    nodes = [
        N("MatMul", ["x", "w1"], ["g"], name="fc1"),
        N("Relu", ["g"], ["h"], name="act"),
        N("MatMul", ["h", "w2"], ["y"], name="fc2"),
    ]
    proto = model(nodes, {"x": ["n", 8]}, constants={"w1": floats(8, 64), "w2": floats(32, 10)}, opset=17)
    assert (
        printed(proto)
        == """\
node 'fc2' (MatMul, opset 17): cannot multiply [n,64] by [32,10]: inner extents 64 and 32 differ
  input 0 (A) is %h : float32[n,64]
    %h : float32[n,64] = Relu(%g) "act"
    %g : float32[n,64] = MatMul(%x, %w1) "fc1"
    %x : float32[n,8], an input of graph 'g'
  input 1 (B) is %w2 : float32[32,10], a constant"""
    )


def test_element_types_that_do_not_fit() -> None:
    nodes = [N("Cast", ["x"], ["c"], to=7), N("Add", ["c", "x"], ["y"], name="sum")]
    assert (
        printed(model(nodes, {"x": [2]}, opset=14))
        == """\
node 'sum' (Add, opset 14): inputs must have one element type, got A: int64, B: float32
  input 0 (A) is %c : int64[2]
    %c : int64[2] = Cast(%x) "c"
    %x : float32[2], an input of graph 'g'
  input 1 (B) is %x : float32[2], an input of graph 'g'"""
    )


def test_computed_shapes_are_shown() -> None:
    nodes = [
        N("Shape", ["x"], ["dims"]),
        N("Concat", ["dims", "four"], ["target"], axis=0),
        N("Reshape", ["k", "target"], ["y"]),
    ]
    proto = model(nodes, {"x": [3]}, constants={"k": floats(10), "four": np.int64([4])})
    assert "input 1 (shape) is %target : int64[2] = [3, 4]" in printed(proto)


def test_long_histories_end() -> None:
    nodes = [N("Relu", ["x" if i == 0 else f"v{i - 1}"], [f"v{i}"]) for i in range(9)]
    proto = model([*nodes, N("MatMul", ["v8", "w"], ["y"])], {"x": [2, 3]}, constants={"w": floats(5, 5)})
    lines = printed(proto).split("\n")
    assert [line.strip()[:4] for line in lines[2:7]] == ["%v8 ", "%v7 ", "%v6 ", "%v5 ", "..."]


def test_long_names_are_shortened() -> None:
    name = "x" * 5000
    nodes = [N("Relu", [name], ["h"]), N("MatMul", ["h", "w"], ["y"])]
    text = printed(model(nodes, {name: [2, 3]}, constants={"w": floats(5, 5)}))
    assert max(map(len, text.split("\n"))) < 220


def test_inside_a_body() -> None:
    product = N("MatMul", ["x", "w"], ["t"], name="inside")
    inner = helper.make_graph([product], "then", [], [onnx.ValueInfoProto(name="t")])
    other = helper.make_graph([N("Neg", ["x"], ["e"])], "else", [], [onnx.ValueInfoProto(name="e")])
    nodes = [N("If", ["flag"], ["y"], then_branch=inner, else_branch=other)]
    proto = model(nodes, {"x": [2, 3]}, constants={"flag": np.array(True), "w": floats(4, 4)})
    assert printed(proto).split("\n")[:2] == [
        "node 'inside' (MatMul, opset 21): cannot multiply [2,3] by [4,4]: inner extents 3 and 4 differ",
        "  input 0 (A) is %x : float32[2,3], from a graph around it",
    ]


def test_a_declared_output_that_its_nodes_contradict() -> None:
    proto = model([N("Relu", ["x"], ["y"], name="act")], {"x": [2, 3]})
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.INT32, [2, 3]))
    assert (
        printed(proto)
        == """\
output 'y': is declared int32[2,3], its nodes make it float32[2,3]
  %y : float32[2,3] = Relu(%x) "act"
  %x : float32[2,3], an input of graph 'g'"""
    )


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (N("Rellu", ["x"], ["y"], name="act"),
         "node 'act' (Rellu): operator Rellu of domain 'ai.onnx', opset 21 is not implemented; did you mean Relu?"),
        (N("Quux", ["x"], ["y"], name="act"),
         "node 'act' (Quux): operator Quux of domain 'ai.onnx', opset 21 is not implemented; no opset of ONNX has it"),
        (N("Fancy", ["x"], ["y"], name="act", domain="com.acme"),
         "node 'act' (Fancy): operator Fancy of domain 'com.acme', opset 1 is not implemented; define it as a "
         "model-local function, or register it (docs/custom-operators.md)"),
    ],
)  # fmt: skip
def test_errors_of_unknown_operators_give_a_hint(node: Any, text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load(model([node], {"x": [2]}, domains={"com.acme": 1}).SerializeToString())
    assert str(caught.value) == text
