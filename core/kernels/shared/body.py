"""Fused scalar bodies for kernel specs: canonical names, constant scalars folded in, and a cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry

DTYPES = frozenset(
    {DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.BOOL}
    | {DType.UINT64, DType.UINT32, DType.UINT16, DType.UINT8}
)
STORED = frozenset({DType.FLOAT16, DType.BFLOAT16})  # kernels load and store such elements, but compute in float32

# Rough cost per element on a CPU, in additions. An operator that is not listed costs 1.
_COSTS = {
    "Exp": 10, "Sigmoid": 14, "Silu": 15, "Swish": 15, "Softplus": 25, "Mish": 35, "Tanh": 20, "Erf": 20, "Gelu": 25,
    "Log": 15, "Pow": 40, "Sin": 20, "Cos": 20, "Tan": 40, "Sinh": 25, "Cosh": 25, "Asin": 30, "Acos": 30, "Atan": 30,
    "Asinh": 30, "Acosh": 30, "Atanh": 30, "Elu": 12, "Selu": 12, "Celu": 12, "Sqrt": 4, "Div": 4, "Reciprocal": 4,
    "Mod": 8,
}  # fmt: skip


def single_body(node: Node) -> Graph:
    """A body with the single elementwise operator of `node`, on scalars. Absent inputs of the node stay absent."""
    inputs = [Value(f"x{i}", _scalar(v)) if v is not None else None for i, v in enumerate(node.inputs)]
    twin = Node(node.op, list(inputs), [], dict(node.attrs))
    twin.outputs = [Value(f"y{i}", _scalar(v), twin) for i, v in enumerate(node.outputs)]
    return Graph("body", [v for v in inputs if v is not None], list(twin.outputs), [twin])


def canonical(body: Graph, known: Mapping[int, Array]) -> Graph:
    """A copy with names by position, so that bodies that differ only in names have equal text.

    The inputs in `known` (index -> array of one element) become constants of the copy.
    """
    copy = body.clone()
    for index, array in known.items():
        value = copy.inputs[index]
        copy.constants[value] = np.asarray(array).reshape(())
    copy.inputs = [value for index, value in enumerate(copy.inputs) if index not in known]
    copy.name = "body"
    _rename(copy)
    return copy


def dtypes(body: Graph) -> set[DType]:
    """The element types of all values of a body: inputs, constants and results of nodes."""
    return {value.dtype for value in body.values()}


def cost(body: Graph) -> int:
    """The estimated cost of one element, in additions."""
    return sum(_COSTS.get(node.op, 1) for node in body.nodes)


def is_arithmetic(body: Graph) -> bool:
    """Whether no operator is a function such as Exp, whose code has many instructions."""
    return all(_COSTS.get(node.op, 1) <= _COSTS["Div"] for node in body.nodes)


def is_scalar(body: Graph) -> bool:
    """Whether every node is a known elementwise operator, so that scalar code can be generated for it."""
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


def with_bias(body: Graph | None, dtype: DType) -> Graph:
    """A body (epilogue) that first adds its new second input, the bias, to its first input, and then does as `body`.

    If `body` is None, the sum is the result. `dtype` is the type of both inputs and of the sum.
    """
    scalar = TensorType(dtype, ())
    value, bias = Value("x", scalar), Value("bias", scalar)
    node = Node("Add", [value, bias], [])
    node.outputs = [Value("biased", scalar, node)]
    if body is None:
        return Graph("body", [value, bias], [node.output], [node])
    copy = body.clone()
    first, *rest = copy.inputs
    copy.replace_uses({first: node.output})
    copy.inputs = [value, bias, *rest]
    copy.nodes.insert(0, node)
    return copy


def is_computable_on_gpu(body: Graph) -> bool:
    """Whether a body can be fused into a GPU kernel: all operators elementwise, all types among those of kernels."""
    return dtypes(body) <= DTYPES | STORED and is_scalar(body)
