"""Limits of constant folding: it must not use much memory or time while compiling."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Value
from lathe.core.passes.simplify.fold_constants import FoldConstants

KIB = 1 << 10


def folded(b: Builder, output: Value, **limits: int) -> Graph:
    b.graph.outputs = [output]
    FoldConstants(**limits).run(b.graph)
    return b.graph


def folded_bytes(graph: Graph) -> int:
    return sum(array.nbytes for array in graph.constants.values())


@pytest.mark.parametrize(("kilobytes", "folds"), [(8, True), (9, False)])
def test_a_result_may_be_as_large_as_the_limit_allows(kilobytes: int, folds: bool) -> None:
    b = Builder(Graph("g"))
    shape = b.constant(np.array([kilobytes * 256]))
    graph = folded(b, b("ConstantOfShape", shape), limit_bytes=8 * KIB)
    assert (len(graph.nodes) == 0) is folds


def test_many_results_together_are_bounded() -> None:
    """A hundred times what a single node may make."""
    b = Builder(Graph("g"))
    made = [b("ConstantOfShape", b.constant(np.array([1024 + i]))) for i in range(100)]
    graph = folded(b, b("Concat", *made, axis=0), limit_bytes=8 * KIB, growth=4)
    assert 8 * KIB < folded_bytes(graph) <= 2 * 4 * 8 * KIB


def test_a_chain_cannot_grow_without_end() -> None:
    """Each node makes its input four times as large, which is allowed once or twice, but not ten times."""
    b = Builder(Graph("g"))
    x = b.constant(np.ones(256, np.float32))
    for _ in range(10):
        x = b("Concat", x, x, x, x, axis=0)
    graph = folded(b, x, limit_bytes=KIB, growth=4)
    assert folded_bytes(graph) <= 4 * 4 * KIB
    assert graph.outputs[0].shape == (256 * 4**10,)


@pytest.mark.parametrize(
    ("op", "shapes", "attrs"),
    [
        ("MatMul", [(2000, 2000), (2000, 2000)], {}),
        ("Einsum", [(3000,)] * 4, {"equation": "a,b,c,d->"}),
        ("Conv", [(1, 64, 100, 100), (64, 64, 9, 9)], {}),
    ],
)
def test_long_computations_are_not_folded(op: str, shapes: list[tuple[int, ...]], attrs: dict[str, str]) -> None:
    b = Builder(Graph("g"))
    constants = [b.constant(np.zeros(shape, np.float32)) for shape in shapes]
    graph = folded(b, b(op, *constants, **attrs))
    assert [node.op for node in graph.nodes] == [op]


def test_short_computations_are_folded() -> None:
    b = Builder(Graph("g"))
    a, c = (b.constant(np.ones(shape, np.float32)) for shape in ((100, 100), (100, 300)))
    assert folded(b, b("MatMul", a, c)).nodes == []


def test_regular_expressions_are_not_folded() -> None:
    """Compiling them is work enough."""
    b = Builder(Graph("g"))
    text = b.constant(np.array(["a" * 40 + "b"], object))
    graph = folded(b, b("RegexFullMatch", text, pattern="(a+)+"))
    assert [node.op for node in graph.nodes] == ["RegexFullMatch"]
