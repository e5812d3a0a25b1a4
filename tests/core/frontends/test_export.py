"""What is exported imports as the same graph, and ONNX Runtime agrees with it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from core.errors import UnsupportedError
from core.frontends.export import export
from core.frontends.onnx import load
from core.ir.build import Builder
from core.ir.dim import symbol
from core.ir.graph import Graph
from core.ir.types import DType, TensorType
from tests.core.frontends.models import floats, model, theirs

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


def test_onnx_runtime_runs_what_is_exported() -> None:
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


def test_what_onnx_cannot_say() -> None:
    with pytest.raises(UnsupportedError, match="has its channels last"):
        export(built("GlobalMaxPool", layout="NHWC"))
    with pytest.raises(UnsupportedError, match="depends on symbols"):
        export(built("Reshape", shape=(symbol("n"), 96)))
