"""One-node models, run by Lathe's reference and by ONNX Runtime: the oracle of the operator tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.reference import run_node
from tests.onnx_runtime import plain_session

OPSET = 22


def one_node_model(
    op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], outputs: int = 1, opset: int = OPSET
) -> onnx.ModelProto:
    """A model of one node: inputs x0, x1 .. (None: absent), outputs y0, y1 .."""
    names = [f"x{i}" if array is not None else "" for i, array in enumerate(inputs)]
    given = {name: array for name, array in zip(names, inputs, strict=True) if name}
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, **attrs)],
        "one",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()],
        [onnx.ValueInfoProto(name=name) for name in results],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def onnx_run(
    op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], outputs: int = 1, opset: int = OPSET
) -> list[Any]:
    """The outputs that ONNX Runtime computes."""
    session = plain_session(one_node_model(op, inputs, attrs, outputs, opset).SerializeToString())
    feeds = {f"x{i}": array for i, array in enumerate(inputs) if array is not None}
    return list(session.run(None, feeds))


def make_node(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], outputs: int = 1) -> Node:
    """A node over values typed like the arrays, its own types not inferred yet."""
    values = [
        None if array is None else Value(f"x{i}", TensorType(DType.from_numpy(array.dtype), array.shape))
        for i, array in enumerate(inputs)
    ]
    fixed = {key: tuple(value) if isinstance(value, list) else value for key, value in attrs.items()}
    unknown = TensorType(DType.FLOAT32, None)
    return Node(op, values, [Value(f"y{i}", unknown) for i in range(outputs)], fixed, op.lower())


def lathe_run(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], outputs: int = 1) -> list[Any]:
    """The outputs of the reference, which must have exactly the inferred shapes and types."""
    node = make_node(op, inputs, attrs, outputs)
    values = zip(node.inputs, inputs, strict=True)
    infer_node(node, {value: array for value, array in values if value is not None})
    results = run_node(node, inputs, {}, {})
    for value, array in zip(node.outputs, results, strict=True):
        assert value.type == TensorType(DType.from_numpy(array.dtype), array.shape), value
    return results


def assert_like_onnx(
    op: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any],
    outputs: int = 1,
    tolerance: float = 1e-5,
    opset: int = OPSET,
) -> list[Any]:
    """Lathe's reference agrees with ONNX Runtime, shapes and types included."""
    ours, theirs = lathe_run(op, inputs, attrs, outputs), onnx_run(op, inputs, attrs, outputs, opset)
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(np.asarray(mine, float), np.asarray(expected, float), tolerance, tolerance)
    return ours


def assert_symbolic_batch(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], outputs: int = 1) -> None:
    """Inference with a symbolic leading dimension, evaluated, equals inference with the number."""
    node, concrete = (make_node(op, inputs, attrs, outputs) for _ in range(2))
    first = node.inputs[0]
    assert first is not None
    first.type = TensorType(first.dtype, (symbol("batch"), *first.shape[1:]))
    for each in (node, concrete):
        values = zip(each.inputs[1:], inputs[1:], strict=True)
        infer_node(each, {value: array for value, array in values if value is not None})
    env = {"batch": len(inputs[0])}
    assert [value.tensor.substitute(env) for value in node.outputs] == [value.type for value in concrete.outputs]


def assert_rows_apart(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], outputs: int = 1) -> None:
    """The operator declares rows of input 0 independent along axis 0, and they are.

    Two requests' rows computed together equal each computed alone.
    """
    node = make_node(op, inputs, attrs, outputs)
    values = zip(node.inputs, inputs, strict=True)
    infer_node(node, {value: array for value, array in values if value is not None})
    rule = registry.get(op)
    axes = rule.rows(registry.Infer(rule, node, {}), [0] + [None] * (len(inputs) - 1))
    assert axes == [0] * outputs
    together = lathe_run(op, inputs, attrs, outputs)
    for rows in (slice(0, 1), slice(1, None)):
        alone = lathe_run(op, [inputs[0][rows], *inputs[1:]], attrs, outputs)
        for whole, part in zip(together, alone, strict=True):
            np.testing.assert_allclose(whole[rows], part, 1e-6, 1e-6)
