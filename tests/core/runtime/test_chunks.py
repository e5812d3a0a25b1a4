"""Large batches in chunks give the same results for any chunk size; some batches must stay whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.plan.cut_points import row_bytes
from lathe.core.plan.plan import ARENA
from lathe.core.runtime.host.chunks import ALL, even_chunk_rows
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.host.memory import address_of
from tests.core.runtime import graphs

N = symbol("n")


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.core.runtime.host.chunks._CACHE_BYTES", 300_000)


def code_of(session: lathe.Session) -> Executable:
    """The executable of a session with one shape."""
    (executable,) = session._shapes.cached_runners().values()
    assert isinstance(executable, Executable)
    return executable


def rows_at_once(session: lathe.Session) -> int:
    return code_of(session)._chunks.rows


def images(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, 16, 32, 32), np.float32)}


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_give_the_results_of_the_whole_batch(threads: int) -> None:
    graph = graphs.convolution()
    session = lathe.compile(graph, threads=threads)
    most = rows_at_once(session)
    assert 1 < most < 10
    for rows in (0, 1, most, most + 1, 2 * most, 3 * most + 1):
        got, want = session.run(images(rows)), lathe.interpret(graph, images(rows))
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_the_arena_is_sized_for_one_chunk() -> None:
    session = lathe.compile(graphs.convolution(), threads=1)
    session.run(images(4 * rows_at_once(session)))
    (context,) = code_of(session)._contexts.idle
    assert context.arena.nbytes <= code_of(session).plan.arena.at(rows_at_once(session))


def test_a_profile_sums_the_chunks() -> None:
    session = lathe.compile(graphs.convolution(), threads=1)
    one = session.profile(images(rows_at_once(session)), runs=3).total
    many = session.profile(images(8 * rows_at_once(session)), runs=3).total
    assert many > 2 * one > 0


def test_weights_are_not_read_again_for_a_few_rows() -> None:
    """The model has many weights and few activations."""
    graph = graphs.mlp(hidden=40_000)
    assert rows_at_once(lathe.compile(graph, threads=1)) > 5


def test_dependent_rows_are_not_split() -> None:
    graph = Graph("mixed")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, 10_000)))
    graph.outputs = [b("Sub", b("Softmax", x, axis=0), b("Softmax", x, axis=1))]
    assert rows_at_once(lathe.compile(graph, threads=1)) == ALL


def parted() -> Graph:
    """Large activations, then a mean of each image, then large weights; embeddings are added."""
    rng = np.random.default_rng(0)
    graph = Graph("parted")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, 16, 16, 16)))
    ids = b.input("ids", TensorType(DType.INT64, (N,)))
    conv = b.constant(rng.standard_normal((32, 16, 3, 3), np.float32) / 12)
    weights = [b.constant(rng.standard_normal(shape, np.float32) / 8) for shape in ((32, 1000), (1000, 50))]
    table = b.constant(rng.standard_normal((5, 50), np.float32))
    image = b("Relu", b("Conv", x, conv, pads=[1, 1, 1, 1]))
    rows = b("Reshape", b("GlobalAveragePool", image), b.constant(np.array([0, 32])))
    y = b("MatMul", b("Relu", b("MatMul", rows, weights[0])), weights[1])
    graph.outputs = [b("Add", y, b("Gather", table, ids, axis=0))]
    return graph


def feeds(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    x = np.random.default_rng(rows).standard_normal((rows, 16, 16, 16), np.float32)
    return {"x": x, "ids": np.arange(rows) % 5}


@pytest.mark.parametrize("threads", [1, 2])
def test_small_chunks_before_a_cut_point_and_large_ones_after_it(threads: int) -> None:
    graph = parted()
    session = lathe.compile(graph, threads=threads)
    chunks = code_of(session)._chunks
    assert chunks.cut_point is not None and 1 < chunks.rows < chunks.rows_after_cut / 2 < 60
    sizes = chunks.rows, chunks.rows + 1, chunks.rows_after_cut, chunks.rows_after_cut + 1
    for rows in (0, 1, *sizes, 2 * chunks.rows_after_cut + 3):
        got, want = session.run(feeds(rows)), lathe.interpret(graph, feeds(rows))
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)
    (context,) = code_of(session)._contexts.idle
    assert context.arena.nbytes <= code_of(session).plan.arena.at(chunks.rows)
    assert context.second.nbytes <= chunks.cut_point.arena.at(chunks.rows_after_cut)


def test_the_arena_fits_each_chunk_of_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk after the cut point has fewer rows, and so may have fewer chunks before the cut point."""
    session = lathe.compile(parted(), threads=1)
    executable = code_of(session)
    assert executable._chunks.cut_point is not None
    run, behind = executable._run_rows, executable._chunks.cut_point.arena
    short: list[tuple[int, int, int]] = []

    def watched(context: Any, bases: Any, first: int, rows: int, steps: tuple[int, int], times: Any) -> None:
        there, size = (context.arena, executable.plan.arena) if steps[0] == 0 else (context.second, behind)
        if there.nbytes < size.at(rows):
            short.append((rows, there.nbytes, size.at(rows)))
        else:
            run(context, bases, first, rows, steps, times)

    monkeypatch.setattr(executable, "_run_rows", watched)
    monkeypatch.setattr(executable._contexts, "_keep", 0)  # every run has an arena of its own
    for rows in range(executable._chunks.rows + 1, 3 * executable._chunks.rows_after_cut):
        session.run(feeds(rows))
    assert not short


def test_an_error_after_a_cut_point_does_not_affect_later_runs() -> None:
    graph = parted()
    session = lathe.compile(graph, threads=1)
    most = code_of(session)._chunks.rows
    with pytest.raises(FeedError, match="index"):
        session.run(feeds(3 * most) | {"ids": np.full(3 * most, 7)})
    (context,) = code_of(session)._contexts.idle
    assert context.bases[ARENA] == address_of(context.arena)
    for rows in (most, 3 * most):
        got, want = session.run(feeds(rows)), lathe.interpret(graph, feeds(rows))
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((N, 3, 2), 24), ((N,), 4), ((5, 2), 0), ((), 0), ((2 * N, 3), None), ((3, N), None), ((N, N), None)],
)
def test_bytes_of_a_row(shape: tuple[Any, ...], expected: int | None) -> None:
    assert row_bytes(TensorType(DType.FLOAT32, shape)) == expected


@pytest.mark.parametrize(("n", "most", "expected"), [(7, 3, 3), (9, 4, 3), (32, 17, 16), (5, 9, 5), (0, 4, 0)])
def test_chunks_are_even(n: int, most: int, expected: int) -> None:
    assert even_chunk_rows(n, most) == expected
