"""Sessions: any batch size, clear errors, concurrency, state, shapes compiled on demand, closing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError, SessionClosed
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.runtime.session.executables import ShapeCode
from tests.core.runtime import graphs


def feed(rows: int, seed: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 20), np.float32)}


def check(graph: Graph, session: lathe.Session, feeds: dict[str, np.ndarray]) -> None:
    got, want = session.run(feeds), lathe.interpret(graph, feeds)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-5)
        assert got[name].dtype == want[name].dtype


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_session_serves_every_batch_size(threads: int) -> None:
    graph = graphs.mlp(hidden=300)
    session = lathe.compile(graph, threads=threads, max_batch=8)
    for rows in (1, 2, 3, 7, 8, 33, 0, 200):
        check(graph, session, feed(rows))


def test_outputs_are_fresh_arrays() -> None:
    session = lathe.compile(graphs.mlp(), threads=1)
    first = session.run(feed(3))["add_2"]
    kept = first.copy()
    session.run(feed(3, seed=2))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "input 'x' is missing; expected float32"),
        ({"x": np.zeros((2, 20), np.float32), "z": np.zeros(1)}, "unknown input 'z'; the model has x"),
        ({"x": np.zeros((2, 20), np.float64)}, "input 'x' has dtype float64, expected float32"),
        ({"x": np.full((2, 20), "1.5")}, "input 'x' has dtype <U3, expected float32"),
        ({"x": np.full((2, 20), b"1.5")}, r"input 'x' has dtype \|S3, expected float32"),
        ({"x": np.full((2, 20), 1.5, object)}, "input 'x' has dtype object, expected float32"),
        ({"x": np.zeros((2, 21), np.float32)}, r"input 'x' has shape \[2, 21\], expected float32\[batch,20\]"),
        ({"x": np.zeros(20, np.float32)}, r"input 'x' has shape \[20\]"),
    ],
)
def test_bad_feeds_are_refused(feeds: dict[str, np.ndarray], message: str) -> None:
    session = lathe.compile(graphs.mlp(), threads=1)
    with pytest.raises(FeedError, match=message):
        session.run(feeds)


def test_strided_and_listed_feeds_are_made_contiguous() -> None:
    graph = graphs.mlp()
    session = lathe.compile(graph, threads=1)
    wide = np.random.default_rng(0).standard_normal((6, 40), np.float32)
    check(graph, session, {"x": wide[::2, ::2]})


def test_many_threads_share_a_session() -> None:
    graph = graphs.mlp(hidden=256)
    session = lathe.compile(graph, threads=2)
    feeds = [feed(rows, seed=rows) for rows in range(1, 9)]
    wants = [lathe.interpret(graph, f)["add_2"] for f in feeds]

    def run(index: int) -> None:
        got = session.run(feeds[index % 8])["add_2"]
        np.testing.assert_allclose(got, wants[index % 8], rtol=2e-5, atol=2e-5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(1000)))


def test_state_lives_between_runs() -> None:
    session = lathe.compile(graphs.counter(), threads=1)
    one = {"x": np.ones(4, np.float32)}
    totals = [next(iter(session.run(one).values()))[0] for _ in range(4)]
    assert totals == [1, 2, 3, 4]


def test_other_symbols_are_compiled_on_demand() -> None:
    graph = graphs.sequence()
    session = lathe.compile(graph, threads=1, new_shapes="wait")
    assert "no shapes seen yet" in session.explain()
    for rows, length in ((1, 5), (3, 5), (2, 17), (1, 1)):
        check(graph, session, {"x": np.random.default_rng(0).standard_normal((rows, length, 8), np.float32)})
    assert "length=17" in session.explain()


def test_an_index_out_of_range_raises_and_the_session_lives_on() -> None:
    session = lathe.compile(graphs.lookup(), threads=1)
    assert "compiled, 0 on the reference" in session.explain()
    with pytest.raises(FeedError, match="index out of range"):
        session.run({"ids": np.array([0, 5])})
    assert next(iter(session.run({"ids": np.array([4, -5])}).values())).tolist() == [[12, 13, 14], [0, 1, 2]]


def test_a_closed_session_refuses_but_lets_runs_in_flight_end() -> None:
    session = lathe.compile(graphs.mlp(), threads=1)
    failures: list[Exception] = []

    def run() -> None:
        try:
            while True:
                session.run(feed(4))
        except SessionClosed:
            return
        except Exception as error:  # any error fails the test
            failures.append(error)

    runners = [threading.Thread(target=run) for _ in range(4)]
    for runner in runners:
        runner.start()
    session.close()
    for runner in runners:
        runner.join(timeout=30)
    assert not failures and not any(runner.is_alive() for runner in runners)
    with pytest.raises(SessionClosed):
        session.run(feed(1))


def test_explain_names_kernels_memory_and_passes() -> None:
    text = lathe.compile(graphs.mlp(), threads=1).explain()
    for expected in ("passes:", "FusedMatMul", "memory: arena", "batching: yes", "0 on the reference"):
        assert expected in text


def test_unoptimized_sessions_agree() -> None:
    graph = graphs.mlp()
    check(graph, lathe.compile(graph, threads=1, optimize=False), feed(5))


def test_a_profile_times_every_step(tmp_path: Path) -> None:
    profile = lathe.compile(graphs.mlp(hidden=512), threads=2).profile(feed(256))
    assert len(profile.nodes) >= 2 and all(node.nanoseconds > 0 for node in profile.nodes)
    assert "GFLOP/s" in profile.table()
    profile.chrome_trace(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == len(profile.nodes)


@pytest.mark.parametrize("new_shapes", ["wait", "default", "background"])
def test_shapes_dropped_during_a_run_do_not_disturb_it(monkeypatch: pytest.MonkeyPatch, new_shapes: Any) -> None:
    monkeypatch.setattr(
        "lathe.core.runtime.session.session._MAX_SHAPES", 1
    )  # every other length drops one that is in use
    graph = graphs.sequence()
    session = lathe.compile(graph, threads=1, tune="off", new_shapes=new_shapes)
    feeds = [{"x": np.random.default_rng(i).standard_normal((3, 4 + i, 8), np.float32)} for i in range(3)]
    wants = [next(iter(lathe.interpret(graph, f).values())) for f in feeds]

    def run(index: int) -> None:
        got = next(iter(session.run(feeds[index % 3]).values()))
        np.testing.assert_allclose(got, wants[index % 3], rtol=2e-5, atol=2e-5)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(120)))
    assert session.explain().count("for length=") == 1
    session.close()
    with pytest.raises(SessionClosed):
        session.run(feeds[0])


def test_compiling_a_shape_does_not_block_other_shapes() -> None:
    graph = graphs.sequence()
    session = lathe.compile(graph, threads=1, new_shapes="wait")
    ready, slow = {"x": np.ones((1, 4, 8), np.float32)}, {"x": np.ones((1, 5, 8), np.float32)}
    session.run(ready)
    compiling, go_on = threading.Event(), threading.Event()
    maker = session._shapes._maker

    def wait(binding: tuple[tuple[str, int], ...]) -> ShapeCode:
        compiling.set()
        assert go_on.wait(30)
        return maker.now(binding)

    session._shapes._maker = replace(maker, now=wait)
    waiting = threading.Thread(target=session.run, args=(slow,))
    waiting.start()
    assert compiling.wait(30)
    session.run(ready)
    go_on.set()
    waiting.join(30)
    assert "length=5" in session.explain()


@pytest.mark.parametrize("optimize", [True, False])
def test_an_empty_batch_keeps_outputs_independent_of_it(optimize: bool) -> None:
    graph = Graph("rest")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (graphs.N, 6)))
    fixed = b.input("fixed", TensorType(DType.FLOAT32, (3, 6)))
    both = [b("Softmax", b("Concat", x, b("Mul", fixed, fixed), axis=0), axis=axis) for axis in (0, 1)]
    far = b("Softmax", b("Hardmax", both[0], axis=0), axis=1)  # the middle one runs on the reference
    graph.outputs = [b("Softmax", b("Add", far, both[1]), axis=1), b("Softmax", fixed, axis=0)]
    session = lathe.compile(graph, threads=1, optimize=optimize)
    rng = np.random.default_rng(0)
    for rows in (0, 1, 2):
        feeds = {"x": rng.standard_normal((rows, 6), np.float32), "fixed": rng.standard_normal((3, 6), np.float32)}
        check(graph, session, feeds)


def test_a_scalar_for_an_input_of_unknown_rank_stays_a_scalar() -> None:
    graph = Graph("any rank")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, None))
    graph.outputs = [b("Neg", x, name="y")]
    session = lathe.compile(graph, threads=1)
    for shape in ((), (1,), (3, 2)):
        fed = np.ones(shape, np.float32)
        np.testing.assert_array_equal(session.run({"x": fed})["y"], -fed, strict=True)
    np.testing.assert_array_equal(session.run({"x": fed.T})["y"], -fed.T, strict=True)


def test_the_reference_runner_refuses_texts_for_numbers() -> None:
    with pytest.raises(FeedError, match="input 'x' has dtype object, expected float32"):
        lathe.interpret(graphs.mlp(), {"x": np.full((2, 20), 1.5, object)})


@pytest.mark.parametrize("code", [code for code in np.typecodes["All"] if np.dtype(code) != np.float32])
def test_arrays_of_every_other_dtype_are_refused(code: str) -> None:
    """Native code would read their bytes as float32, those of objects too, which are addresses."""
    x = np.zeros((2, 20), np.dtype(code) if code not in "SUV" else np.dtype(f"{code}4"))
    for run in (lathe.compile(graphs.mlp(), threads=1).run, lambda feeds: lathe.interpret(graphs.mlp(), feeds)):
        with pytest.raises(FeedError, match="input 'x' has dtype"):
            run({"x": x})
