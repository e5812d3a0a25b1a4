"""Interrupting runs that may never end because of their data: each is detected and interrupted separately."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx.parser
import pytest

import lathe
import lathe.core.compiler.options
from lathe import Session
from lathe.core.errors import Interrupted
from tests.core.runtime.test_control import model

FOREVER = np.array(1 << 62)
FEEDS = {"m": FOREVER, "x": np.full((2, 4), 0.5, np.float32)}
FEW = FEEDS | {"m": np.array(3)}


def loop(op: str = "Tanh", width: str = "4", x: str = "x") -> str:
    return f"""h = Loop (m, go, {x}) <body = b (int64 i, bool c, float[n,{width}] hin)
        => (bool again, float[n,{width}] hout)
    {{
        again = Identity(c)
        hout = {op}(hin)
    }}>"""


def inside(op: str, inputs: str = "", carried: str = "") -> str:
    """The loop in the body of another node."""
    declared, x = (f"float[n,4] {carried}", carried) if carried else ("", "x")
    attribute = "body" if carried else "then_branch"
    trips = "int64 j, bool d, " if op == "Loop" else ""
    still = ("bool still, ", "still = Identity(d)") if op == "Loop" else ("", "")
    other = "" if carried else ", else_branch = e () => (float[n,4] h) { h = Relu(x) }"
    return f"""h = {op} ({inputs}) <{attribute} = outer ({trips}{declared}) => ({still[0]}float[n,4] h)
    {{
        {still[1]}
        {loop(x=x)}
    }}{other}>"""


def endless(body: str = "") -> bytes:
    """A loop of `m` iterations."""
    return model(body or loop(), "int64 m, float[n,4] x", "float[n,4] h", "bool go = {1}")


def interrupts_run(session: Session, running: Future[Any], pool: ThreadPoolExecutor) -> int:
    """Interrupt the run of the pool's only thread; returns the number of the run."""
    (thread,) = pool._threads
    while thread.ident not in session.runs():
        assert not running.done()
        time.sleep(0.001)
    run = session.runs()[thread.ident or 0]
    session.interrupt(run + 1)
    time.sleep(0.01)
    assert not running.done()
    end = time.monotonic() + 60
    while not running.done() and time.monotonic() < end:
        session.interrupt(run)
        time.sleep(0.001)
    with pytest.raises(Interrupted):
        running.result(0)
    assert not session.runs()
    return run


@pytest.mark.parametrize(
    ("body", "native"),
    [
        (loop(), True),
        (inside("Loop", "m, go, x", "xin"), True),
        (inside("If", "go"), True),
        (loop("RandomNormalLike <seed = 1.0>"), False),
    ],
    ids=["one loop", "a loop in a loop", "a loop in a branch", "on the reference"],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_endless_loop_is_interrupted(body: str, native: bool, threads: int) -> None:
    with lathe.compile(lathe.load(endless(body)), threads=threads) as session, ThreadPoolExecutor(1) as pool:
        assert (" 0 on the reference" in session.explain()) == native
        assert session.may_not_end
        few = session.run(FEW)["h"]
        interrupts_run(session, pool.submit(session.run, FEEDS), pool)
        np.testing.assert_array_equal(session.run(FEW)["h"], few)  # the session is unharmed


def test_an_interrupt_does_not_reach_the_next_run() -> None:
    """By the same thread, with the same memory."""
    with lathe.compile(lathe.load(endless()), threads=1) as session, ThreadPoolExecutor(1) as pool:
        first = interrupts_run(session, pool.submit(session.run, FEEDS), pool)
        running = pool.submit(session.run, FEEDS)
        while not session.runs():
            time.sleep(0.001)
        for _ in range(20):
            session.interrupt(first)
            time.sleep(0.001)
        assert not running.done()
        assert interrupts_run(session, running, pool) > first


def test_all_runs_are_interrupted() -> None:
    with lathe.compile(lathe.load(endless()), threads=1) as session, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(session.run, FEEDS) for _ in range(2)]
        while not all(each.done() for each in running):
            session.interrupt()
            time.sleep(0.001)
        assert [type(each.exception()) for each in running] == [Interrupted] * 2


def test_a_run_is_interrupted_after_its_code_was_dropped() -> None:
    """The code was dropped because of other shapes."""
    data = model(loop(width="k"), "int64 m, float[n,k] x", "float[n,k] h", "bool go = {1}")
    with lathe.compile(lathe.load(data), threads=1, new_shapes="wait") as session, ThreadPoolExecutor(1) as pool:
        assert session.may_not_end
        running = pool.submit(session.run, FEEDS)
        while not session.runs():
            time.sleep(0.001)
        for k in range(5, 14):
            session.run({"m": np.array(1), "x": np.zeros((1, k), np.float32)})
        assert (("k", 4),) not in session._shapes.cached_runners()
        interrupts_run(session, running, pool)


def test_a_loop_between_parts_on_a_device_is_interrupted() -> None:
    body = f"a = Relu(x)\n{loop(x='a')}\ny = Relu(h)"
    data = model(body, "int64 m, float[n,4] x", "float[n,4] y", "bool go = {1}")
    with lathe.compile(lathe.load(data), device="simulated:0", threads=1) as session, ThreadPoolExecutor(1) as pool:
        assert session.may_not_end and session.devices == ("simulated:0",)
        interrupts_run(session, pool.submit(session.run, FEEDS), pool)


SCAN = """h = Scan <num_scan_inputs = 1, body = b (float[4] row) => (float[4] out) { out = Tanh(row) }> (x)"""
BRANCH = """h = If (yes) <then_branch = t () => (float[n,4] a) { a = Tanh(x) },
    else_branch = e () => (float[n,4] b) { b = Relu(x) }>"""


@pytest.mark.parametrize("body", [SCAN, BRANCH], ids=["scan", "branch"])
@pytest.mark.parametrize("op", ["Tanh", "RandomNormalLike <seed = 1.0>"], ids=["native", "reference"])
def test_bounded_models_are_not_watched(body: str, op: str) -> None:
    data = model(body.replace("Tanh", op), "float[n,4] x, bool yes", "float[n,4] h")
    with lathe.compile(lathe.load(data), threads=1) as session:
        assert (" 0 on the reference" in session.explain()) == (op == "Tanh")
        assert not session.may_not_end


def test_an_artifact_records_whether_it_may_run_for_ever(tmp_path: Any) -> None:
    """Also before any of its shapes is compiled."""
    for width in ("4", "k"):
        data = model(loop(width=width), f"int64 m, float[n,{width}] x", f"float[n,{width}] h", "bool go = {1}")
        options = lathe.core.compiler.options.make_options("cpu", "float32", 1, 8, True, None)
        lathe.core.compiler.compile.compile_to(tmp_path / "model", lathe.load(data), options)
        with lathe.load_compiled(tmp_path / "model") as session:
            assert session.may_not_end


def test_a_long_regex_match_is_interrupted() -> None:
    """Each character may be as much work as the pattern is long."""
    text = """<ir_version: 9, opset_import: ["" : 20]>
        g (string[n] x) => (bool[n] y) { y = RegexFullMatch <pattern = "((a?){1000}){9}b"> (x) }"""
    data = onnx.parser.parse_model(text).SerializeToString()
    with lathe.compile(lathe.load(data), threads=1) as session, ThreadPoolExecutor(1) as pool:
        assert session.may_not_end
        np.testing.assert_array_equal(session.run({"x": np.array(["ab", "a"], object)})["y"], [True, False])
        interrupts_run(session, pool.submit(session.run, {"x": np.array(["a" * 4000] * 10, object)}), pool)


def test_an_interrupt_just_before_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is sent once; the run of many iterations still ends."""
    with lathe.compile(endless(), threads=1, tune="off") as session:
        session.run(FEEDS | {"m": np.array(3)})
        workers = session._interruptible()[0]._team
        enter = workers.enter

        def late(team: Any, context: Any) -> int:
            session.interrupt()
            return enter(team, context)

        monkeypatch.setattr(workers, "enter", late)
        with pytest.raises(Interrupted):
            session.run(FEEDS | {"m": np.array(1000)})
        monkeypatch.undo()
        session.run(FEW)
