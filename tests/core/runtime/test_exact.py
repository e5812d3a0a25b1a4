"""`winograd=False`: every product follows its definition, so results far below their neighbours stay exact."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType, symbol

BORDER = 10  # lies in a Winograd tile, whose results from 11 on do not depend on pixels left of 10
OTHERWISE = ("winograd 4x4", "(AMX)")  # kernels that do not follow the definition
FAR = 1e4  # factor on the values left of the border


def convolution(weight: Array) -> Graph:
    graph = Graph("convolution")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), 32, 16, 16)))
    graph.outputs = [b("Conv", x, b.constant(weight), pads=(1, 1, 1, 1))]
    return graph


@pytest.fixture
def problem() -> tuple[Graph, Array, Array]:
    """A convolution, an image with very different values left and right, and the exact result."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((32, 32, 3, 3)).astype(np.float32)
    x = rng.standard_normal((2, 32, 16, 16)).astype(np.float32)
    x[..., :BORDER] *= FAR
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3)
    )
    return convolution(weight), x, np.einsum("nihwjk,oijk->nohw", windows, weight)


def error_of_near(session: lathe.Session, x: Array, exact: Array) -> float:
    """The largest error of results that depend only on the right part, relative to the largest of these results."""
    [y] = session.run({"x": x}).values()
    return float(np.abs(y - exact)[..., BORDER + 1 :].max() / np.abs(exact[..., BORDER + 1 :]).max())


def test_small_results_beside_large_ones_are_exact_without_winograd(problem: tuple[Graph, Array, Array]) -> None:
    graph, x, exact = problem
    fast, plain = (lathe.compile(graph, threads=1, winograd=choice) for choice in (True, False))
    assert error_of_near(plain, x, exact) < 2e-6
    if "winograd 4x4" in fast.explain():  # otherwise the kernel is for matrix tiles, which compute rows separately
        assert error_of_near(fast, x, exact) > 1e-4  # tiles reach across the border


def test_explain_shows_the_direct_products(problem: tuple[Graph, Array, Array]) -> None:
    fast, plain = (lathe.compile(problem[0], threads=1, winograd=choice) for choice in (True, False))
    for session in (fast, plain):
        session.run({"x": problem[1]})
    assert any(otherwise in fast.explain() for otherwise in OTHERWISE)
    assert "winograd=False" not in fast.explain()
    assert not any(otherwise in plain.explain() for otherwise in OTHERWISE)
    assert "winograd=False: every product is computed by its definition" in plain.explain()
