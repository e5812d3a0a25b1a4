"""If and Loop, imported and interpreted, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.errors import ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import SymDim
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name: str, dtype: int, shape: Sequence[Any] | None) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def number(name: str, value: Any) -> Any:
    return onnx.numpy_helper.from_array(np.asarray(value), name)


def model(nodes: Any, inputs: Any, outputs: Any, constants: Any = ()) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(constants))
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(proto.SerializeToString())


def agree(data: bytes, feeds: dict[str, Any]) -> dict[str, Any]:
    """Lathe's outputs, equal to ONNX Runtime's."""
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    ours = lathe.interpret(lathe.load(data), feeds)
    for value, theirs in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        np.testing.assert_allclose(ours[value.name], theirs, 1e-6)
        assert (ours[value.name].dtype, ours[value.name].shape) == (theirs.dtype, theirs.shape)
    return ours


def branch(op: str, shape: Sequence[Any]) -> Any:
    """A branch that applies `op` to the outer value x and the outer constant two."""
    return helper.make_graph([helper.make_node(op, ["x", "two"], [f"{op}_y"])], op, [], [info(f"{op}_y", FLOAT, shape)])


@pytest.mark.parametrize("chosen", [True, False])
def test_if_runs_one_branch_on_captured_values(chosen: bool) -> None:
    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("Mul", ["n", 3]), else_branch=branch("Sub", ["n", 3])
    )
    data = model(
        [node],
        [info("c", BOOL, []), info("x", FLOAT, ["n", 3])],
        [info("y", FLOAT, ["n", 3])],
        [number("two", np.float32(2))],
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    agree(data, {"c": np.array(chosen), "x": x})


def loop_model(limit: Any, threshold: float) -> bytes:
    """Doubles `v` while its sum stays below the threshold, scanning every value; counts the trips in `t`."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["v", "v"], ["v2"]),
            helper.make_node("ReduceSum", ["v2"], ["total"], keepdims=0),
            helper.make_node("Less", ["total", "threshold"], ["on"]),
            helper.make_node("Add", ["i", "one"], ["t2"]),
            helper.make_node("Identity", ["v2"], ["seen"]),
        ],
        "body",
        [info("i", INT, []), info("c", BOOL, []), info("v", FLOAT, [2]), info("t", INT, [])],
        [info("on", BOOL, []), info("v2", FLOAT, [2]), info("t2", INT, []), info("seen", FLOAT, [2])],
    )
    node = helper.make_node(
        "Loop", ["M" if limit is not None else "", "", "x", "zero"], ["y", "t_end", "all"], body=body
    )
    constants = [number("threshold", np.float32(threshold)), number("one", 1), number("zero", 0)]
    constants += [number("M", limit)] if limit is not None else []
    outputs = [info("y", FLOAT, [2]), info("t_end", INT, []), info("all", FLOAT, [None, 2])]
    return model([node], [info("x", FLOAT, [2])], outputs, constants)


@pytest.mark.parametrize(("limit", "threshold", "trips"), [(3, 1e9, 3), (10, 20.0, 3), (None, 40.0, 4), (0, 1e9, 0)])
def test_loop_stops_at_its_limit_or_condition(limit: Any, threshold: float, trips: int) -> None:
    ours = agree(loop_model(limit, threshold), {"x": np.array([1, 2], np.float32)})
    assert len(ours["all"]) == trips


def test_a_carried_value_may_grow() -> None:
    """A shape that changes from trip to trip becomes a symbol."""
    body = helper.make_graph(
        [helper.make_node("Concat", ["v", "x"], ["v2"], axis=0), helper.make_node("Identity", ["c"], ["on"])],
        "body",
        [info("i", INT, []), info("c", BOOL, []), info("v", FLOAT, [None])],
        [info("on", BOOL, []), info("v2", FLOAT, [None])],
    )
    data = model(
        [helper.make_node("Loop", ["M", "", "x"], ["y"], body=body)],
        [info("x", FLOAT, [2]), info("M", INT, [])],
        [info("y", FLOAT, [None])],
    )
    ours = agree(data, {"x": np.array([1, 2], np.float32), "M": np.array(3)})
    assert ours["y"].shape == (8,)
    (y,) = lathe.load(data).outputs
    assert isinstance(y.shape[0], SymDim)


def _branch_graph(dtype: DType) -> Graph:
    graph = Graph("branch")
    graph.outputs = [Builder(graph).constant(np.zeros(2, dtype.numpy))]
    return graph


def test_branches_of_different_types_are_refused() -> None:
    graph = Graph()
    build = Builder(graph)
    condition = build.input("c", TensorType(DType.BOOL, ()))
    branches = {"then_branch": _branch_graph(DType.FLOAT32), "else_branch": _branch_graph(DType.INT64)}
    with pytest.raises(ModelError, match=r"output0 is float32\[2\] on one path and int64\[2\] on another"):
        build("If", condition, **branches)
    with pytest.raises(ModelError, match=r"cond is int64\[\], expected bool"):
        build("If", build.constant(np.array(1)), **branches)
