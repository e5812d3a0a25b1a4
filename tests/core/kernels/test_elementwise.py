"""Elementwise kernels: every operator, broadcast patterns, element types, fused bodies, in-place facts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.codegen.target import host
from lathe.core.errors import ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import VIEWS, In, Out, Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from lathe.core.ops.opdef import registry
from lathe.core.reference import interpret
from tests.core.kernels.harness import scalar_body, single_node
from tests.core.kernels.sweep import floats, kernel, normal, positive, sweep, tensor
from tests.core.targets import each_target

DTYPES = ("float32", "float64", "int32", "int64", "uint8", "int8", "bool")
NEEDED: dict[str, dict[str, Any]] = {"Cast": {"to": DType.INT32}, "BitShift": {"direction": "RIGHT"}}
OPERATORS = [
    name for name in registry.names() if registry.get(name).is_elementwise and name not in {*VIEWS, "FusedElementwise"}
]


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize(
    "shapes",
    [
        ("n", "n"),
        ("n,7", "n,7"),
        ("n,33", "33"),
        ("n,5,3", "n,1,3"),
        ("n,3,4,5", "3,1,1"),
        ("n,1,17", "5,1"),
        ("n,1", "1,70"),
        ("3,n", "3,1"),
        ("n,3", ""),
        ("", ""),
        ("2,1,3,1,5", "n,1,4,1"),
    ],
)
def test_broadcast_patterns(target: Target, shapes: tuple[str, str]) -> None:
    sweep("Sub", *(f"float32[{shape}]" for shape in shapes), target=target)


def _inputs(op: str, dtype: str) -> list[str] | None:
    """Input types of this dtype, of shapes that broadcast; None if the operator does not accept the dtype."""
    least, most = registry.get(op).arity
    shapes = ("n,7,5", "7,1", "5")[: max(least, 2) if most is None else least]
    types = [f"{'bool' if op == 'Where' and i == 0 else dtype}[{shape}]" for i, shape in enumerate(shapes)]
    try:
        single_node(op, *(tensor(text) for text in types), **NEEDED.get(op, {}))
    except ModelError:
        return None
    return types


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_in_every_type(op: str) -> None:
    tried = ("float32", "float64", "int64", "uint8", "bool")
    covered = [(dtype, inputs) for dtype in tried if (inputs := _inputs(op, dtype)) is not None]
    assert covered
    for dtype, inputs in covered:
        whole = dtype != "bool" and not dtype.startswith("float")
        sample = positive if whole and op in ("Div", "Mod", "Pow") else normal
        with np.errstate(all="ignore"):
            attrs = NEEDED.get(op, {})
            tolerance = 1e-12 if dtype == "float64" else 2e-6
            sweep(op, *inputs, target=host(), batches=(9,), sample=sample, tolerance=tolerance, **attrs)


@pytest.mark.sample(2)
@each_target
@pytest.mark.parametrize("op", [*OPERATORS, "Gelu by tanh"])
def test_limits_are_reached(target: Target, op: str) -> None:
    """At infinities, and at numbers so large that the result is its limit: 0, 1, -1 or an operand."""
    op, _, by = op.partition(" by ")
    attrs = {"approximate": by} if by else NEEDED.get(op, {})
    least, most = registry.get(op).arity
    count = max(least, 2) if most is None else least
    if count > 2 or _inputs(op, "float32") is None:
        return
    column = np.array([-np.inf, -1e30, -1e3, -20, -1, -0.0, 0, 0.5, 1, 20, 1e3, 1e30, np.inf, np.nan], np.float32)
    given = [column[:, None], column][:count]
    compiled = kernel(op, *["float32[n,1]", f"float32[{column.size}]"][:count], target=target, **attrs)
    with np.errstate(all="ignore"):
        (want,) = interpret(compiled.graph, {f"x{i}": array for i, array in enumerate(given)}).values()
        (got,) = compiled(*given)
    limits = [np.full(want.shape, each, np.float32) for each in (0, 1, -1, np.nan, np.inf, -np.inf)]
    limits += [np.broadcast_to(array, want.shape) for array in given]
    reached = np.any([(want == limit) | (np.isnan(want) & np.isnan(limit)) for limit in limits], axis=0)
    np.testing.assert_array_equal(got[reached], want[reached])


@pytest.mark.sample(5)
@each_target
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("to", ["float32", "int64", "bool"])
def test_casts(target: Target, source: str, to: str) -> None:
    sweep("Cast", f"{source}[n,7]", to=DType.parse(to), target=target, sample=positive, batches=(0, 5))


@each_target
def test_where_takes_three_patterns(target: Target) -> None:
    sweep("Where", "bool[n,7]", "float32[7]", "float32[n,1]", target=target)


def _body() -> Graph:
    """A body of two outputs: x * b + 1, and its Relu."""
    body = Graph("body")
    build = Builder(body)
    x, b = (build.input(name, TensorType(DType.FLOAT32, ())) for name in ("x", "b"))
    total = build("Add", build("Mul", x, b), build.constant(np.float32(1)))
    body.outputs = [total, build("Relu", total)]
    return body


@each_target
def test_fused_body_with_two_outputs(target: Target) -> None:
    sweep("FusedElementwise", "float32[n,33]", "float32[33]", body=_body(), outputs=2, target=target)


def test_names_do_not_matter_to_the_code() -> None:
    first, second = _body(), _body()
    second.inputs[0].name, second.nodes[0].name = "other", "label"
    specs = [
        kernel("FusedElementwise", "float32[n]", "float32[n]", body=b, outputs=2).call.spec for b in (first, second)
    ]
    assert specs[0].key == specs[1].key


def test_constants_of_one_element_become_code() -> None:
    compiled = kernel("Mul", "float32[n,3]", np.full((1,), 2, np.float32))
    assert compiled.call.operands == (In(0), Out(0))
    compiled.check(floats(5, 3))


def test_in_place_only_where_shapes_are_equal() -> None:
    assert kernel("Add", "float32[n,3]", "float32[3]").call.inplace == (0,)
    assert kernel("Add", "float32[n,3]", "float32[n,3]").call.inplace == (0, 1)
    assert kernel("Equal", "float32[n,3]", "float32[n,3]").call.inplace == ()


def test_neighbouring_loops_with_one_pattern_are_merged() -> None:
    spec = kernel("Add", "float32[n,3,4,5]", "float32[4,5]").call.spec
    assert spec.nest.rank == 2  # type: ignore[attr-defined]


@each_target
def test_large_tensors_are_split_among_threads(target: Target) -> None:
    sweep("Exp", "float32[n,1000]", target=target, batches=(1, 201, 330))
    sweep("Add", "float32[n,1]", "float32[1,200000]", target=target, batches=(1, 2, 3))


@each_target
def test_special_numbers_pass_through(target: Target) -> None:
    compiled = kernel("Relu", "float32[n]", target=target)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-45], np.float32)
    compiled.check(special)


def test_types_outside_the_algebra_run_on_the_reference() -> None:
    graph = single_node("Add", tensor("float16[n]"), tensor("float16[n]"))
    assert select(Request(graph.nodes[0], graph.constants, kernel("Relu", "float32[n]").target)) is None


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize(
    ("value", "dtypes"),
    [
        (300, (DType.INT32, DType.INT8, DType.INT32)), (-1, (DType.INT32, DType.UINT8, DType.INT32)),
        (2**40 + 7, (DType.INT64, DType.INT32, DType.INT64)), (-1, (DType.INT64, DType.UINT64, DType.INT64)),
        (0.1, (DType.FLOAT32, DType.FLOAT16, DType.FLOAT32)), (0.1, (DType.FLOAT64, DType.FLOAT32, DType.FLOAT64)),
        (0.1, (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT32)), (1e6, (DType.FLOAT32, DType.FLOAT16, DType.FLOAT32)),
        (2**24 + 1, (DType.INT32, DType.FLOAT32, DType.FLOAT64)), (0.1, (DType.FLOAT32, DType.FLOAT64, DType.FLOAT64)),
    ],
    ids=str,
)  # fmt: skip
@each_target
def test_constants_are_converted_as_numbers_of_a_run_are(
    target: Target, value: float, dtypes: tuple[DType, DType, DType]
) -> None:
    """A body may convert a constant: it is wrapped or rounded when the code is generated."""
    first, second, third = dtypes

    def write(b: Builder, x: Value) -> Value:
        constant = b.constant(np.array(value, first.numpy))
        narrow = b("Cast", constant, to=second.onnx_code)
        return b("Add", x, b("Cast", narrow, to=third.onnx_code))

    body = scalar_body(1, write, third)
    sweep("FusedElementwise", f"{third}[n,3]", body=body, target=target, batches=(2,), tolerance=1e-9)
