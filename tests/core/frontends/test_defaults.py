"""Initializers that are also inputs: which of them a feed may override, and how the graph declares that."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lathe
from lathe.core.errors import FeedError, VerifyError
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.verify import verify
from lathe.core.passes.lowering.input_variants import with_default_inputs
from lathe.core.passes.pipeline import optimize
from tests.core.frontends.models import theirs


def model(
    nodes: list[onnx.NodeProto],
    x: list[Any],
    defaults: dict[str, Any],
    opset: int = 13,
    declared: dict[str, list[Any] | None] | None = None,
) -> onnx.ModelProto:
    """A model with the input x and the output y; `declared` are shapes other than the defaults' own."""
    arrays = {name: np.asarray(array) for name, array in defaults.items()}
    shapes = {name: list(array.shape) for name, array in arrays.items()} | (declared or {})
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]
    inputs += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shapes[name])
        for name, array in arrays.items()
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def load(proto: onnx.ModelProto) -> Graph:
    return lathe.load(proto.SerializeToString())


def scaled() -> onnx.ModelProto:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("Mul", ["r", "c"], ["y"])]
    return model(nodes, ["n", 6], {"s": np.array([-1, 3]), "c": np.float32([2])}, declared={"c": ["k"]})


X = np.arange(12, dtype=np.float32).reshape(2, 6)


def types(graph: Graph) -> dict[str, str]:
    return {value.name: str(type_) for value, type_ in graph.defaults.items()}


def test_an_initializer_that_is_an_input_is_a_default_of_the_declared_type() -> None:
    graph = load(scaled())
    assert [value.name for value in graph.inputs] == ["x"]
    assert types(graph) == {"s": "int64[2]", "c": "float32[k]"}


def test_an_initializer_that_is_no_input_is_none() -> None:
    proto = scaled()
    del proto.graph.input[1:]
    assert load(proto).defaults == {}


def test_before_ir_version_4_all_initializers_are_constants() -> None:
    """Before IR version 4 every initializer had to be an input. ONNX Runtime refuses feeds for them."""
    proto = scaled()
    proto.ir_version = 3
    assert load(proto).defaults == {}
    np.testing.assert_array_equal(lathe.interpret(load(proto), {"x": X})["y"], theirs(proto, {"x": X})["y"])
    with pytest.raises(Exception, match="Invalid input name: c"):
        theirs(proto, {"x": X, "c": np.float32([1])})


def test_a_declaration_that_contradicts_the_default_is_ignored() -> None:
    proto = scaled()
    proto.graph.input[1].type.tensor_type.ClearField("shape")
    proto.graph.input[2].type.tensor_type.elem_type = TensorProto.DOUBLE
    assert types(load(proto)) == {"s": "int64[2]", "c": "float32[1]"}


@pytest.mark.parametrize("fed", [{}, {"c": np.float32([3, 4, 5])}, {"s": np.array([6, -1]), "c": np.float32([7])}])
def test_the_reference_accepts_fed_defaults(fed: dict[str, Any]) -> None:
    proto = scaled()
    got = lathe.interpret(load(proto), {"x": X, **fed})
    np.testing.assert_array_equal(got["y"], theirs(proto, {"x": X, **fed})["y"])


def test_the_reference_refuses_fed_defaults_of_the_wrong_type() -> None:
    with pytest.raises(FeedError, match=r"input 'c' has dtype float64, expected float32"):
        lathe.interpret(load(scaled()), {"x": X, "c": np.float64([1])})


def test_shapes_inferred_from_a_default_are_dropped_if_it_may_be_fed() -> None:
    graph = load(scaled())
    assert graph.outputs[0].shape[1] == 3
    fed = with_default_inputs(graph, ["s"])
    assert [value.name for value in fed.inputs] == ["x", "s"]
    assert fed.outputs[0].shape[1] != 3
    assert fed.defaults == {}
    assert types(graph) == {"s": "int64[2]", "c": "float32[k]"}
    with pytest.raises(ValueError, match="no defaults named q"):
        with_default_inputs(graph, ["q", "s"])


@pytest.mark.parametrize("big", [False, True])
def test_text_and_clones_keep_defaults(big: bool) -> None:
    w = np.ones((6, 40 if big else 2), np.float32)
    graph = load(model([helper.make_node("MatMul", ["x", "w"], ["y"])], ["n", 6], {"w": w}, declared={"w": [6, "k"]}))
    weights = Weights()
    text = print_graph(graph, weights)
    again = parse_graph(text, weights.tobytes())
    assert types(graph) == types(again) == types(graph.clone()) == {"w": "float32[6,k]"}
    assert print_graph(again, Weights()) == text
    bound = graph.clone({"k": 2})
    assert types(bound) == {"w": "float32[6,2]"}


def test_the_verifier_refuses_invalid_defaults() -> None:
    graph = load(scaled())
    (c,) = [value for value in graph.defaults if value.name == "c"]
    graph.defaults[c] = graph.inputs[0].tensor
    with pytest.raises(VerifyError, match=r"default %c is float32\[1\], but may be given as float32\[n,6\]"):
        verify(graph)
    graph = load(scaled())
    del graph.constants[next(iter(graph.defaults))]
    with pytest.raises(VerifyError):
        verify(graph)


def test_export_writes_defaults_as_inputs_with_initializers() -> None:
    proto = onnx.load_from_string(lathe.export(load(scaled())))
    assert [info.name for info in proto.graph.input] == ["x", "s", "c"]
    fed = {"x": X, "c": np.float32([1, 2, 3])}
    np.testing.assert_array_equal(theirs(proto, fed)["y"], theirs(scaled(), fed)["y"])
    assert types(load(proto)) == types(load(scaled()))


def test_optimized_graphs_have_no_defaults() -> None:
    optimized, _ = optimize(load(scaled()))
    assert optimized.defaults == {}


def test_a_value_that_the_import_depends_on_is_no_default() -> None:
    """The import converts Tile of opset 1 and needs its numbers for that; only the factor of Mul stays a default."""
    nodes = [helper.make_node("Tile", ["x", "tiles", "axis"], ["t"]), helper.make_node("Mul", ["t", "c"], ["y"])]
    numbers = {"tiles": np.float32(2), "axis": np.float32(1), "c": np.float32([2])}
    assert types(load(model(nodes, ["n", 6], numbers, opset=1))) == {"c": "float32[1]"}


@pytest.mark.parametrize("shape", [[2, 6], [3, 4]])
def test_old_forms_hold_for_every_shape_or_have_no_default(shape: list[int]) -> None:
    """Softmax of opset 11 works on a matrix, whose sizes may follow from a shape that is fed."""
    nodes = [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("Softmax", ["r"], ["y"], axis=1)]
    proto = model(nodes, ["n", 6], {"s": np.array([2, 3, 2])}, opset=11)
    graph = load(proto)
    fed = {"x": X, "s": np.array([*shape, 1])}
    if graph.defaults:
        np.testing.assert_allclose(lathe.interpret(graph, fed)["y"], theirs(proto, fed)["y"], rtol=1e-6)
    else:
        with pytest.raises(FeedError, match="unknown input 's'"):
            lathe.interpret(graph, fed)
