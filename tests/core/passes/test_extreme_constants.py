"""Constants near the ends of the range of their dtype: merging or folding them neither overflows nor underflows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.pipeline import Options, canonical_passes, optimizing_passes, run_passes
from lathe.core.passes.rewrite.base import Pass
from lathe.core.passes.simplify.fold_affine import FoldAffine
from lathe.core.reference import interpret


def _chain(dtype: Any, steps: tuple[str, str], c: float, d: float) -> Graph:
    """Two nodes, each of which multiplies its input by a number (of which it may be the reciprocal)."""
    images = not {"Conv", "BatchNormalization"}.isdisjoint(steps)
    x = Value("x", TensorType(DType.from_numpy(np.dtype(dtype)), (1, 2, 1, 1) if images else (1, 2)))
    graph = Graph("g", inputs=[x])
    build, y = Builder(graph), x
    for op, number in zip(steps, (c, d), strict=True):
        scalar, ones = np.asarray(number, dtype), np.ones(2, dtype)
        matrix = (np.eye(2) * number).astype(dtype)
        match op:
            case "MatMul" | "Gemm":
                y = build(op, y, build.constant(matrix))
            case "Conv":
                y = build(op, y, build.constant(matrix.reshape(2, 2, 1, 1)))
            case "BatchNormalization":
                y = build(op, y, *(build.constant(ones * each) for each in (scalar, 0, 0, 1)), epsilon=0.0)
            case _:
                y = build(op, y, build.constant(scalar))
    graph.outputs = [y]
    return graph


def _numbers(dtype: Any, steps: tuple[str, str]) -> Iterator[tuple[float, float, float]]:
    """Yield inputs and two constants for which the result and the number between the nodes are far from the ends."""
    limits = np.finfo(dtype)
    most, least = float(limits.max), float(limits.tiny)
    constants = (most / 8, least * 8, 1e4, 1e-4, most**0.6, least**0.6)
    for x, c, d in itertools.product(np.geomspace(least * 8, most / 8, 5), constants, constants):
        between = x / c if steps[0] == "Div" else x * c
        result = between / d if steps[1] == "Div" else between * d
        if all(least * 16 < number < most / 16 for number in (between, result)):
            yield float(x), c, d


CHAINS = [
    ("Mul", "Mul"), ("Div", "Mul"), ("Mul", "Div"), ("Div", "Div"), ("MatMul", "Mul"), ("Gemm", "Div"), ("Conv", "Mul"),
    ("Conv", "BatchNormalization"), ("Mul", "MatMul"), ("Div", "Gemm"), ("Mul", "Conv"), ("BatchNormalization", "Conv"),
]  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("steps", CHAINS, ids="-".join)
@pytest.mark.parametrize(
    ("dtype", "passes"),
    [(np.float16, canonical_passes()), (np.float32, optimizing_passes(Options()))],
    ids=["float16 canonical", "float32 optimized"],
)
def test_results_stay_finite_whatever_constants_are_merged(
    dtype: Any, passes: list[Pass], steps: tuple[str, str]
) -> None:
    count = 0
    for x, c, d in _numbers(dtype, steps):
        graph = _chain(dtype, steps, c, d)
        feeds = {"x": np.full(graph.inputs[0].shape, x).astype(dtype)}
        (want,) = interpret(graph, feeds).values()
        optimized, _ = run_passes(graph, passes)
        (got,) = interpret(optimized, feeds).values()
        np.testing.assert_allclose(got, want, rtol=0.02 if dtype == np.float16 else 1e-4, err_msg=f"{x} {c} {d}")
        count += 1
    assert count >= 10


def test_a_normalization_whose_factor_is_no_float32_stays() -> None:
    graph = Graph("g", inputs=[Value("x", TensorType(DType.FLOAT32, (1, 2, 1, 1)))])
    build = Builder(graph)
    scale, zero, variance = (build.constant(np.array(each, np.float32)) for each in ([1, 0], [0, 0], [0, 4]))
    graph.outputs = [build("BatchNormalization", graph.inputs[0], scale, zero, zero, variance, epsilon=0.0)]
    FoldAffine().run(graph)
    assert [node.op for node in graph.nodes] == ["BatchNormalization"]


@pytest.mark.parametrize("inside", [False, True])
def test_integral_weights_in_a_body_keep_their_factor_outside(inside: bool) -> None:
    """Nodes of the outer graph may be discontinuous, and sums of integers are exact."""
    graph = Graph("body", inputs=[Value("x", TensorType(DType.FLOAT32, (1, 2)))])
    build = Builder(graph)
    product = build("MatMul", graph.inputs[0], build.constant(np.array([[1, 2], [3, 4]], np.float32)))
    graph.outputs = [build("Mul", product, build.constant(np.array(0.1, np.float32)))]
    FoldAffine(inside).run(graph)
    assert [node.op for node in graph.nodes] == (["MatMul", "Mul"] if inside else ["MatMul"])
