"""Fused bodies as kernels want them: one canonical text per meaning, known scalars inside, and a cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import DType, TensorType
from core.ops import registry

# Rough cost of one element on a CPU, in multiples of an addition; everything else counts 1.
_COSTS = {
    "Exp": 10, "Sigmoid": 14, "Silu": 15, "Swish": 15, "Softplus": 25, "Mish": 35, "Tanh": 20, "Erf": 20, "Gelu": 25,
    "Log": 15, "Pow": 40, "Sin": 20, "Cos": 20, "Tan": 40, "Sinh": 25, "Cosh": 25, "Asin": 30, "Acos": 30, "Atan": 30,
    "Asinh": 30, "Acosh": 30, "Atanh": 30, "Elu": 12, "Selu": 12, "Celu": 12, "Sqrt": 4, "Div": 4, "Reciprocal": 4,
    "Mod": 8,
}  # fmt: skip


def single_body(node: Node) -> Graph:
    """A body that does what one elementwise node does. Absent inputs stay absent and are no inputs of the body."""
    inputs = [Value(f"x{i}", _scalar(v)) if v is not None else None for i, v in enumerate(node.inputs)]
    twin = Node(node.op, list(inputs), [], dict(node.attrs))
    twin.outputs = [Value(f"y{i}", _scalar(v), twin) for i, v in enumerate(node.outputs)]
    return Graph("body", [v for v in inputs if v is not None], list(twin.outputs), [twin])


def canonical(body: Graph, known: Mapping[int, Array]) -> Graph:
    """A copy whose names say only positions; the inputs in `known` (index -> array of one element) are constants."""
    copy = body.clone()
    for index, array in known.items():
        value = copy.inputs[index]
        copy.constants[value] = np.asarray(array).reshape(())
    copy.inputs = [value for index, value in enumerate(copy.inputs) if index not in known]
    copy.name = "body"
    _rename(copy)
    return copy


def dtypes(body: Graph) -> set[DType]:
    """Every element type that appears in a body."""
    return {value.dtype for value in body.values()}


def cost(body: Graph) -> int:
    """Work for one element, in additions."""
    return sum(_COSTS.get(node.op, 1) for node in body.nodes)


def is_scalar(body: Graph) -> bool:
    """Whether every node can be evaluated in the scalar algebra."""
    return all((op := registry.find(node.op)) is not None and op.is_elementwise for node in body.nodes)


def _scalar(value: Value) -> TensorType:
    return TensorType(value.dtype, ())


def _rename(body: Graph) -> None:
    _number(body.inputs, "x")
    _number(list(body.constants), "c")
    _number([value for node in body.nodes for value in node.outputs], "t")
    for node in body.nodes:
        node.name = ""


def _number(values: Sequence[Value], prefix: str) -> None:
    for index, value in enumerate(values):
        value.name = f"{prefix}{index}"
