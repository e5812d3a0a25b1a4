"""New shapes at run time: reference runs until the code is compiled, its replacement, and closing."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError, SessionClosed
from lathe.core.frontends.export import export
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.executables import ShapeCode
from lathe.core.runtime.session.reference_runner import ReferenceRunner, operation_count
from lathe.core.runtime.session.run_inputs import Binding, RunInputs
from tests.core import partly_dynamic_models as partial
from tests.core.runtime import graphs

Feeds = dict[str, np.ndarray]


def feed(length: int, rows: int = 2) -> Feeds:
    return {"x": np.random.default_rng(length).standard_normal((rows, length, 8), np.float32)}


def given(length: int) -> RunInputs:
    return RunInputs(2, list(feed(length).values()), (("length", length),))


def agree(graph: Graph, session: lathe.Session, feeds: Feeds) -> None:
    for name, want in lathe.interpret(graph, feeds).items():
        np.testing.assert_allclose(session.run(feeds)[name], want, rtol=2e-5, atol=2e-5)


def slowed(session: lathe.Session, go_on: threading.Event) -> None:
    """Make the session's background compilation wait for `go_on`."""
    maker = session._shapes._maker

    def waiting(stage: Callable[[Binding, Background], ShapeCode]) -> Callable[[Binding, Background], ShapeCode]:
        def run(binding: Binding, background: Background) -> ShapeCode:
            assert go_on.wait(30)
            return stage(binding, background)

        return run

    session._shapes._maker = replace(maker, later=tuple(map(waiting, maker.later)))


def without_reference_runs(session: lathe.Session) -> None:
    session._shapes._maker = replace(session._shapes._maker, general=None)


def test_reference_operators_answer_while_a_shape_is_compiled() -> None:
    graph, go_on = graphs.sequence(), threading.Event()
    session = lathe.compile(graph, threads=1)
    slowed(session, go_on)
    agree(graph, session, feed(4))
    agree(graph, session, feed(6))
    assert "length=4: tuned" in session.explain()
    assert "length=6: being compiled; the reference runner serves meanwhile" in session.explain()
    assert not session.settle(timeout=0.01)
    go_on.set()
    assert session.settle(timeout=60)
    assert "length=6: tuned" in session.explain()
    agree(graph, session, feed(6))
    session.close()


def test_reference_operators_answer_the_first_shape() -> None:
    graph, go_on = graphs.sequence(), threading.Event()
    session = lathe.compile(graph, threads=1, new_shapes="background")
    slowed(session, go_on)
    agree(graph, session, feed(3))
    assert session.memory is None
    go_on.set()
    assert session.settle(timeout=60) and session.memory is not None
    session.close()


def test_a_run_given_up_by_reference_operators_waits_for_the_code() -> None:
    graph = graphs.sequence()
    session = lathe.compile(graph, threads=1, new_shapes="background")
    without_reference_runs(session)
    agree(graph, session, feed(5))
    assert "length=5" in session.explain()
    session.close()


def test_a_reference_run_stops_when_the_code_is_ready() -> None:
    graph = graphs.sequence()
    general = lathe.compile(graph, threads=1)._shapes._maker.general
    assert general is not None
    asked = iter((False, True))
    assert general.run(given(5), lambda: next(asked)) is None
    assert general.run(given(5), lambda: False) is not None


def test_reference_runs_pause_as_long_as_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, go_on = graphs.sequence(), threading.Event()
    session = lathe.compile(graph, threads=1, new_shapes="background")
    slowed(session, go_on)
    run, spans = ReferenceRunner.run, []

    def slow(self: ReferenceRunner, given: RunInputs, enough: Callable[[], bool]) -> list[Any] | None:
        started = time.monotonic()
        time.sleep(0.05)
        results = run(self, given, enough)
        spans.append((started, time.monotonic()))
        return results

    monkeypatch.setattr(ReferenceRunner, "run", slow)
    for _ in range(3):
        agree(graph, session, feed(4))
    go_on.set()
    session.close()
    for (began, ended), (following, _) in itertools.pairwise(spans):
        assert following - ended >= ended - began - 0.01


def test_one_reference_run_at_a_time() -> None:
    graph, go_on = graphs.sequence(), threading.Event()
    session = lathe.compile(graph, threads=1, new_shapes="background")
    slowed(session, go_on)
    session.run(feed(4))
    with session._shapes.enter((("length", 4),)) as shape, shape.answering:
        assert session._shapes.stand_in_answer(shape, given(4)) is None
    go_on.set()
    session.close()


def test_reference_runs_return_fresh_row_major_arrays() -> None:
    graph = Graph("moved")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (graphs.N, 3)))
    kept = b.constant(np.ones((2, 2), np.float32))
    graph.outputs = [b("Transpose", x, perm=(1, 0)), b("Identity", x), b("Identity", kept)]
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    outputs = ReferenceRunner(graph).run(RunInputs(2, [array]), lambda: False)
    assert outputs is not None and outputs[0].flags.c_contiguous
    np.testing.assert_array_equal(outputs[0], array.T)
    assert not any(np.shares_memory(output, owned) for output in outputs for owned in (array, graph.constants[kept]))


def test_work_is_that_of_products_and_of_calling_nodes() -> None:
    graph = Graph("products")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (graphs.N, 3, 10, 10)))
    weights = b.constant(np.zeros((4, 3, 3, 3), np.float32))
    graph.outputs = [b("Conv", x, weights, pads=(1, 1, 1, 1))]
    one, two = operation_count(graph, {"batch": 1}), operation_count(graph, {"batch": 2})
    assert two - one == 2 * (4 * 100) * 27
    assert operation_count(graph, {}) == float("inf")


each_with_steps = pytest.mark.parametrize("name", ["lstm", "scanned", "looped"])


def partial_graph(name: str) -> Graph:
    return lathe.load(partial.MODELS[name]().SerializeToString())


@each_with_steps
def test_work_over_time_grows_with_the_steps(name: str) -> None:
    graph = partial_graph(name)
    few, many = (operation_count(graph, {"batch": 2, "length": length}) for length in (10, 10_000))
    assert 500 * few < many < 2000 * few


@each_with_steps
def test_references_answer_a_new_length_of_a_model_with_steps(name: str) -> None:
    graph, feeds = partial_graph(name), partial.feeds(2, 9)
    outputs = ReferenceRunner(graph).run(RunInputs(2, [feeds["x"]], (("length", 9),)), lambda: False)
    assert outputs is not None
    np.testing.assert_allclose(outputs[0], lathe.interpret(graph, feeds)["y"])


def test_reference_runs_are_not_used_for_long_or_endless_work() -> None:
    many = np.zeros((2, 300_000, 16), np.float32)
    assert (
        ReferenceRunner(partial_graph("lstm")).run(RunInputs(2, [many], (("length", 300_000),)), lambda: False) is None
    )
    assert operation_count(partial_graph("looped_on"), {"batch": 2, "length": 4}) == float("inf")


def test_a_reference_run_leaves_a_loop_when_no_caller_waits() -> None:
    asked = itertools.count()
    x = np.zeros((2, 500, 16), np.float32)
    given = RunInputs(2, [x], (("length", 500),))
    assert ReferenceRunner(partial_graph("looped")).run(given, lambda: next(asked) > 40) is None
    assert next(asked) < 50


def test_an_invalid_feed_is_refused_by_both_paths() -> None:
    graph = graphs.sequence()
    session = lathe.compile(graph, threads=1, new_shapes="background")
    with pytest.raises(FeedError, match="expected"):
        session.run({"x": np.zeros((2, 4, 9), np.float32)})
    session.close()


def test_a_run_compiles_if_the_background_cannot() -> None:
    graph = graphs.sequence()
    session = lathe.compile(graph, threads=1, new_shapes="background")

    def fails(binding: Binding, background: Background) -> ShapeCode:
        raise RuntimeError("no room")

    without_reference_runs(session)
    session._shapes._maker = replace(session._shapes._maker, later=(fails, fails))
    agree(graph, session, feed(4))
    assert session.settle(timeout=30) and "length=4: tuned" in session.explain()
    session.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(export(graphs.sequence()))
    return path


@pytest.mark.slow
def test_a_child_compiles_and_its_code_is_cached(model: Path, tmp_path: Path) -> None:
    graph, cache = graphs.sequence(), tmp_path / "cache"
    with lathe.compile(model, threads=1, cache_dir=cache, new_shapes="background") as session:
        agree(graph, session, feed(7))
        assert session.settle(timeout=60)
        assert "length=7: tuned" in session.explain()
        agree(graph, session, feed(7))
    with lathe.compile(model, threads=1, cache_dir=cache, new_shapes="background") as session:
        agree(graph, session, feed(7))
        assert "length=7: tuned" in session.explain()  # in the cache, so no run waits


def test_code_compiled_by_a_child_is_not_compiled_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lathe.compile(model, threads=1, cache_dir=tmp_path / "cache", new_shapes="background") as session:

        def refuse(*_: Any) -> Any:
            raise AssertionError("compiled in the process that answers")

        monkeypatch.setattr("lathe.core.compiler.pipeline.build", refuse)
        session.run(feed(7))
        assert session.settle(timeout=60) and "length=7: tuned" in session.explain()


def test_closing_ends_the_child(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    finish = Background.run_child

    def sleeping(self: Background, arguments: list[str], patient: bool) -> bool:
        return finish(self, ["parse", str(tmp_path / "pipe"), str(tmp_path / "out")])  # a pipe without a writer

    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Background, "run_child", sleeping)
    session = lathe.compile(model, threads=1, cache_dir=tmp_path / "cache", new_shapes="background")
    session.run(feed(4))
    (background, _) = session._shapes._backgrounds
    while background._child is None:
        time.sleep(0.01)
    child = background._child
    children.append(child.pid)
    session.close()
    assert child.poll() is not None and background.settle(timeout=0)
    with pytest.raises(SessionClosed):
        session.run(feed(4))


def test_closing_wakes_runs_that_wait_for_code() -> None:
    session = lathe.compile(graphs.sequence(), threads=1, new_shapes="background")
    without_reference_runs(session)
    go_on, outcome = threading.Event(), []
    slowed(session, go_on)

    def run() -> None:
        try:
            session.run(feed(4))
        except SessionClosed as error:
            outcome.append(error)
        finally:
            go_on.set()

    waiting = threading.Thread(target=run)
    waiting.start()
    while not session._shapes.states():
        time.sleep(0.01)
    session.close()
    waiting.join(30)
    assert outcome and not waiting.is_alive()


def test_shapes_dropped_before_their_turn_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.core.runtime.session.session._MAX_SHAPES", 2)
    graph, go_on = graphs.sequence(), threading.Event()
    session = lathe.compile(graph, threads=1, tune="off")
    slowed(session, go_on)
    for length in range(1, 8):
        agree(graph, session, feed(length))
    go_on.set()
    assert session.settle(timeout=60)
    assert {binding[0][1] for binding in session._shapes.cached_runners()} == {6, 7}
    session.close()


@pytest.mark.slow
def test_tuned_code_replaces_the_first_during_other_runs(tmp_path: Path) -> None:
    graph, path = graphs.mlp(hidden=300), tmp_path / "mlp.onnx"
    path.write_bytes(export(graph))
    session = lathe.compile(path, threads=1, cache_dir=tmp_path / "cache", tune="background")
    first = session._shapes.cached_runners()[()]
    assert "compiled without measuring" in session.explain()
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 20), np.float32)}
    (want,) = lathe.interpret(graph, feeds).values()
    ended = threading.Event()

    def run(_: int) -> int:
        runs = 0
        while not ended.is_set():
            (got,) = session.run(feeds).values()
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
            runs += 1
        return runs

    with ThreadPoolExecutor(2) as pool:
        counts = pool.map(run, range(2))
        assert session.settle(timeout=60)
        ended.set()
        assert all(counts)
    assert session._shapes.cached_runners()[()] is not first and "tuned" in session.explain()
    session.close()


@pytest.mark.parametrize("kind", ["graph", "bytes"])
def test_tuning_in_the_background_needs_a_file(kind: str, tmp_path: Path) -> None:
    model = graphs.mlp() if kind == "graph" else export(graphs.mlp())
    with pytest.raises(lathe.errors.UnsupportedError, match="needs the path of a file"):
        lathe.compile(model, cache_dir=tmp_path, tune="background")


def test_unknown_values_of_new_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="new_shapes is 'never', expected 'default', 'wait', 'background'"):
        lathe.compile(graphs.sequence(), threads=1, new_shapes="never")  # type: ignore[arg-type]


def test_code_of_a_dropped_shape_stays_for_all_waiting_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.core.runtime.session.session._MAX_SHAPES", 1)
    graph, go_on = graphs.sequence(), threading.Event()
    session = lathe.compile(graph, threads=1, tune="off", new_shapes="background")
    without_reference_runs(session)
    slowed(session, go_on)
    with session._shapes.enter((("length", 4),)) as shape, session._shapes.enter((("length", 5),)):
        go_on.set()
        for _ in range(2):  # both waiting runs, one after the other
            with session._shapes.executable(shape) as executable:
                assert executable.run(2, list(feed(4).values()))
    with pytest.raises(SessionClosed):
        executable.run(2, list(feed(4).values()))
    session.close()
