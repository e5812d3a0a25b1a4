"""Passes over tensors with an extent of 0: the optimized graph gives the same shapes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lathe.core.ir.build import Builder
from lathe.core.ir.dim import Dim, symbol
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.pipeline import optimize
from lathe.core.reference import interpret

N = symbol("n")
CONSTANTS: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (0, 1), (1, 1, 1))


def _linear(first: str, weight: tuple[int, int], second: str, shape: tuple[int, ...], scaled_before: bool) -> Graph:
    """x of [n, 0, 3], multiplied by a matrix and combined with a constant, after it or before it."""
    graph = Graph("g")
    b = Builder(graph)
    extents: tuple[Dim, ...] = (N, 0, 3)
    x = b.input("x", TensorType(DType.FLOAT32, extents))
    w, c = b.constant(np.ones(weight, np.float32)), b.constant(np.full(shape, 2.5, np.float32))
    y = b(first, b(second, x, c), w) if scaled_before else b(second, b(first, x, w), c)
    graph.outputs = [b("Identity", y)]
    return graph


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("second", "shape"), list(product(("Add", "Mul", "Div", "Sub"), CONSTANTS)))
@pytest.mark.parametrize("weight", [(3, 1), (3, 2)])
def test_a_constant_beside_a_product_without_rows(
    weight: tuple[int, int], second: str, shape: tuple[int, ...], before: bool
) -> None:
    graph = _linear("MatMul", weight, second, shape, before)
    optimized, _ = optimize(graph.clone())
    for n in (0, 1, 2):
        feeds = {"x": np.zeros((n, 0, 3), np.float32)}
        (expected,), (actual,) = (interpret(g, feeds).values() for g in (graph, optimized))
        assert actual.shape == expected.shape == (n, 0, weight[1])


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_view_of_a_symbol_that_is_zero_copies_no_extent(n: int) -> None:
    """The targets of views name all extents; a symbol that is 0 means the extent 0, not a copied extent."""
    graph = Graph("g")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (2, N)))
    graph.outputs = [b("Reshape", b("Exp", x), shape=(-1,)), b("Flatten", b("Transpose", x, perm=(1, 0)), axis=0)]
    optimized, _ = optimize(graph.clone())
    bound = optimized.clone({"n": n})
    infer_graph(bound)
    feeds = {"x": np.ones((2, n), np.float32)}
    for one in (optimized, bound):
        for expected, actual in zip(interpret(graph, feeds).values(), interpret(one, feeds).values(), strict=True):
            assert actual.shape == expected.shape
