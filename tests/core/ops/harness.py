"""Cases as graphs of Lathe, and by the oracles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.reference import interpret
from tests.core.one_node import OPSET, onnx_run
from tests.core.ops.cases import Case

NEWER = {"Swish": 24, "CumProd": 26, "SpaceToDepth": 28, "TensorScatter": 24, "BitCast": 26}
OLDER = {"RoiAlign": 16, "MaxRoiPool": 1}  # ONNX Runtime has no newer one


def graph_of(case: Case, shapes: Mapping[int, tuple[Dim, ...]] | None = None, bind: bool = False) -> Graph:
    """The case as a graph with inferred types; `shapes` replaces the shapes of some inputs.

    Parameters are constants, or attributes if `bind` is true."""
    graph = Graph(case.op.lower())
    node = Node(case.op, [], [], {key: _attr(value) for key, value in case.attrs.items()}, case.label)
    for index, array in enumerate(case.inputs):
        node.inputs.append(_input(graph, node, case, index, array, (shapes or {}).get(index), bind))
    while node.inputs and node.inputs[-1] is None:
        node.inputs.pop()
    node.outputs = [Value(f"y{i}", TensorType(DType.FLOAT32, None), node) for i in range(case.outputs)]
    graph.nodes, graph.outputs = [node], list(node.outputs)
    infer_graph(graph)
    return graph


def _input(
    graph: Graph, node: Node, case: Case, index: int, array: Any, shape: tuple[Dim, ...] | None, bind: bool
) -> Value | None:
    if array is None:
        return None
    if index not in case.param_indices:
        graph.inputs.append(Value(f"x{index}", TensorType(DType.from_numpy(array.dtype), shape or array.shape)))
        return graph.inputs[-1]
    if not bind:
        return graph.add_constant(array, f"x{index}")
    name = next(name for name, at in registry.get(case.op).params.items() if at == index)
    node.attrs[name] = tuple(array.ravel().tolist())
    return None


def _attr(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def run_lathe(case: Case, bind: bool = False) -> list[Any]:
    """The outputs of the reference executor, which checks the declared element types."""
    return run(graph_of(case, bind=bind), case.inputs)


def run(graph: Graph, inputs: tuple[Any, ...]) -> list[Any]:
    results = interpret(graph, {value.name: inputs[int(value.name[1:])] for value in graph.inputs})
    return [results[value.name] for value in graph.outputs]


def oracle(case: Case) -> list[Any]:
    """The outputs of ONNX Runtime, or of ONNX's reference evaluator if the case says so."""
    attrs = {key: onnx.numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for key, v in case.attrs.items()}
    if case.oracle == "ort":
        return onnx_run(case.op, case.inputs, attrs, case.outputs, OLDER.get(case.op, OPSET))
    names = [f"x{i}" if array is not None else "" for i, array in enumerate(case.inputs)]
    results = [f"y{i}" for i in range(case.outputs)]
    node = onnx.helper.make_node(case.op, names, results, **attrs)
    given = {name: array for name, array in zip(names, case.inputs, strict=True) if name}
    infos = [onnx.ValueInfoProto(name=name) for name in (*given, *results)]
    graph = onnx.helper.make_graph([node], "one", infos[: len(given)], infos[len(given) :])
    version = 24 if "round_mode" in attrs else NEWER.get(case.op, OPSET)
    opset = onnx.helper.make_opsetid("", version)
    model = onnx.helper.make_model(graph, opset_imports=[opset])
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(None, given))


def numbers(array: Any) -> Any:
    """An array that `assert_allclose` can compare."""
    array = np.asarray(array)
    if array.dtype.kind in "OU":
        return np.vectorize(str, otypes=[object])(array) if array.size else array
    return array.astype(np.float64)


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    actual, expected = numbers(actual), numbers(expected)
    assert actual.shape == expected.shape
    if actual.dtype == object:
        assert actual.tolist() == expected.tolist()
    else:
        np.testing.assert_allclose(actual, expected, tolerance, tolerance)
