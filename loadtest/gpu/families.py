"""One node for every family of GPU kernels, with its operands: a smoke test of all kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType, parse_type


def floats(*shape: int) -> NDArray[Any]:
    """Normal random numbers, the same for a given shape in every run."""
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def _sum() -> Graph:
    """The epilogue x + y."""
    graph = Graph("body")
    b = Builder(graph)
    x, y = (b.input(name, TensorType(DType.FLOAT32, ())) for name in ("x0", "x1"))
    graph.outputs = [b("Add", x, y)]
    return graph


IMAGE = {"layout": "NHWC", "pads": (1, 1, 1, 1)}

# Operator, inputs, attributes. A string is an input of that type, an array is a constant.
FAMILIES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Gelu", ("float32[n,7]",), {}),
    ("Where", ("bool[n,1]", "float16[n,7]", "float16[7]"), {}),
    ("FusedMatMul", ("float32[n,9]", floats(9, 5), "float32[n,5]"), {"epilogue": _sum()}),
    ("FusedConv", ("float32[n,5,6,16]", floats(8, 16, 3, 3), floats(8)), IMAGE),
    ("FusedConv", ("bfloat16[n,5,6,16]", floats(16, 1, 3, 3)), {**IMAGE, "group": 16}),
    ("FusedConv", ("uint8[n,5,6,8]", np.ones((8, 4, 3, 3), np.int8)), {**IMAGE, "group": 2, "pad_value": 9}),
    ("ConvTranspose", ("float32[n,6,4,5]", "float32[6,4,3,2]"), {"strides": (2, 2)}),
    ("ConvWeightGradient", ("float32[n,4,9,8]", "float32[n,6,7,6]"), {"kernel_shape": (3, 3)}),
    ("FusedAttention", ("float32[n,3,20,8]", "float32[n,3,8,30]", "float32[n,3,30,8]"), {}),
    ("Softmax", ("float32[n,9000]",), {}),
    ("LayerNormalization", ("float32[n,33]", floats(33), floats(33)), {}),
    ("ReduceMean", ("float32[n,4,5]",), {"axes": (0, 1)}),
    ("ArgMax", ("float32[n,4,5]",), {"axis": 1}),
    ("CumSum", ("float32[n,4,5]",), {"axis": (1,), "exclusive": 1}),
    ("TopK", ("float32[n,40]",), {"K": (3,)}),
    ("RecurrentSteps", ("float32[4,n,27]", floats(1, 27, 9)), {"cell": "GRU", "outputs": 2}),
    ("MaxPool", ("float32[n,9,8,5]",), {"kernel_shape": (3, 3), "layout": "NHWC"}),
    ("MaxPoolGradient", ("float32[n,5,8,8]", "float32[n,5,4,4]"), {"kernel_shape": (2, 2), "strides": (2, 2)}),
    ("Transpose", ("int64[n,40,50]",), {"perm": (0, 2, 1)}),
    ("Concat", ("float32[n,3]", "float32[n,4]"), {"axis": 1}),
    ("PackImage", ("float32[n,3,6,8]",), {"channels": 4, "block": 2, "to": DType.BFLOAT16}),
    ("Gather", (floats(11, 7), "int64[n,3]"), {}),
    ("ScatterND", ("float32[70,5]", "int64[n,1]", "float32[n,5]"), {"reduction": "add"}),
    ("ScatterElements", ("float32[7,5]", "int64[3,5]", "float32[3,5]"), {}),
    ("Resize", ("float32[n,3,7,20]",), {"mode": "linear", "scales": (1.0, 1.0, 2.0, 3.0)}),
]  # fmt: skip


def graph_of(op: str, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> Graph:
    """A graph of the one node."""
    graph = Graph(op.lower())
    b = Builder(graph)
    values = [_value(b, index, given) for index, given in enumerate(inputs)]
    attributes = dict(attributes)
    graph.outputs = list(b.emit(op, *values, outputs=attributes.pop("outputs", 1), name="y", **attributes))
    return graph


def feeds_of(graph: Graph, n: int) -> dict[str, NDArray[Any]]:
    """Random inputs for a batch of `n`. Integers are below 7, so that they are valid indices of all operands."""
    rng = np.random.default_rng(n)

    def array(value: Value) -> NDArray[Any]:
        shape, dtype = value.tensor.evaluate({"n": n}), value.dtype
        if dtype.is_float:
            return rng.standard_normal(shape).astype(dtype.numpy)
        return rng.integers(0, 2 if dtype is DType.BOOL else 7, shape).astype(dtype.numpy)

    return {value.name: array(value) for value in graph.inputs}


def _value(b: Builder, index: int, given: Any) -> Value:
    if not isinstance(given, str):
        return b.constant(given)
    type_ = parse_type(given)
    if not isinstance(type_, TensorType):
        raise TypeError(f"expected a tensor type, got {given}")
    return b.input(f"x{index}", type_)
