"""The scalar expression of every elementwise operator computes what its reference does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry, scalar_math
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.ops.opdef.registry import NodeView
from tests.core.ops.cases import CASES, Case
from tests.core.ops.harness import assert_close, graph_of, run_lathe
from tests.core.ops.numpy_scalar import NumpyScalar

# Narrow floats are computed in float32 by kernels, strings and 8-bit floats never by one.
_WIDE = ("float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64", "bool")
ELEMENTWISE = [
    case
    for case in CASES
    if registry.get(case.op).is_elementwise
    and all(array is None or array.dtype.name in _WIDE for array in case.inputs)
    and case.attrs.get("to") not in (8, 16, 17, 22)
]


def evaluate(case: Case, bind: bool) -> Any:
    """The output by the scalar expression, on the inputs broadcast against each other."""
    node = graph_of(case, bind=bind).nodes[0]
    op = registry.get(case.op)
    arrays = [x for x, value in zip(case.inputs, node.inputs, strict=False) if value is not None]
    with np.errstate(all="ignore"):
        return op.scalar(NumpyScalar(), NodeView(op, node), *arrays)


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("case", ELEMENTWISE, ids=lambda case: case.label)
def test_scalar_expression_agrees_with_the_reference(case: Case, bind: bool) -> None:
    (expected, *_), actual = run_lathe(case), evaluate(case, bind)
    assert np.asarray(actual).dtype == expected.dtype
    assert_close(np.broadcast_to(actual, expected.shape), expected, max(case.tolerance, 2e-6))


def test_every_elementwise_operator_is_covered() -> None:
    own = {"FusedElementwise", "StopGradient", "RoundableRows"}  # no operators of ONNX
    all_of_them = {name for name in registry.names() if registry.get(name).is_elementwise} - own
    assert all_of_them == {case.op for case in ELEMENTWISE}


FUNCTIONS = {
    "log1p": (np.log1p, [-0.9, -1e-3, -1e-8, 1e-20, 1e-8, 1e-3, 0.5, 3.0, 1e9, 1e30, np.inf]),
    "sinh": (np.sinh, [-80.0, -2.0, -1.0, -0.999, -1e-4, 1e-20, 0.5, 1.0, 3.0, 88.9, np.inf]),
    "cosh": (np.cosh, [-80.0, -2.0, -1e-4, 0.0, 0.5, 3.0, 88.9, np.inf]),
    "asinh": (np.arcsinh, [-1e30, -5.0, -1e-3, 1e-20, 1e-3, 0.5, 9.0, 1e10, 1e38, np.inf]),
    "acosh": (np.arccosh, [1.0, 1.0001, 1.5, 20.0, 1e8, 1e10, 1e38, np.inf]),
    "atanh": (np.arctanh, [-1.0, -0.99, -1e-3, 1e-20, 1e-3, 0.5, 0.9999, 1.0]),
    "atan": (np.arctan, [-np.inf, -1e9, -2.5, -1.0, -0.41, -1e-8, 1e-3, 0.42, 2.4, 2.5, 1e9, np.inf]),
    "asin": (np.arcsin, [-1.0, -0.9, -0.51, -0.5, -1e-8, 1e-3, 0.49, 0.99999, 1.0]),
    "acos": (np.arccos, [-1.0, -0.9, -0.51, -0.5, -1e-8, 1e-3, 0.49, 0.99999, 1.0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_composed_functions_are_exact_to_float32(name: str) -> None:
    """Relative to the result, so that small arguments do not lose their digits; zeros and NaN are kept."""
    exact, points = FUNCTIONS[name]
    x = np.array([*points, np.nan], np.float32)
    with np.errstate(all="ignore"):
        actual = getattr(scalar_math, name)(NumpyScalar(), x)
        expected = exact(x.astype(np.float64)).astype(np.float32)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1.5e-6, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_composed_functions_are_exact_to_float64(name: str) -> None:
    """Relative to NumPy's result, at the points above and at many between them."""
    exact, points = FUNCTIONS[name]
    finite = np.clip([point for point in points if np.isfinite(point)], -100, 100)
    between = np.linspace(min(finite), max(finite), 1001)
    x = np.array([*points, *between, *(between / 1000), np.nan])
    with np.errstate(all="ignore"):
        actual, expected = getattr(scalar_math, name)(NumpyScalar(), x), exact(x)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=5e-14, atol=0)


@pytest.mark.parametrize("name", [name for name in registry.names() if registry.get(name).is_elementwise])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT64, DType.BOOL], ids=str)
def test_an_input_that_others_may_not_exceed_is_declared(name: str, dtype: DType) -> None:
    """Passes may shrink every other input of an elementwise operator if one input has all elements."""
    op = registry.get(name)
    count = max(op.arity[0], 2)
    if op.arity[1] == 1 or not _is_inferred(op, dtype, [(2, 3)] * count):
        return
    refused = [i for i in range(count) if not _is_inferred(op, dtype, [() if j == i else (2, 3) for j in range(count)])]
    assert refused == ([] if op.shaped_by is None else [op.shaped_by])


def _is_inferred(op: registry.OpDef, dtype: DType, shapes: Sequence[tuple[int, ...]]) -> bool:
    given = [dtype if op.name != "Where" or i else DType.BOOL for i in range(len(shapes))]
    values = [
        Value(f"x{i}", TensorType(each, shape)) for i, (each, shape) in enumerate(zip(given, shapes, strict=True))
    ]
    node = Node(op.name, list(values), [], {}, "node")
    node.outputs = [Value("y", TensorType(dtype, None), node)]
    try:
        infer_node(node, {})
    except ModelError:
        return False
    return True
