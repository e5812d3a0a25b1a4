"""The thread pool: every thread runs once per job, no run waits for ever, an idle pool uses no CPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.runtime.host.cpus import available_cpus
from lathe.core.runtime.host.thread_pool import thread_pool
from tests.core.runtime import graphs


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_more_threads_than_processors_still_end(threads: int) -> None:
    graph = graphs.mlp(hidden=700)
    session = lathe.compile(graph, threads=threads)
    x = {"x": np.random.default_rng(0).standard_normal((300, 20), np.float32)}
    want = lathe.interpret(graph, x)["add_2"]
    for _ in range(30):
        np.testing.assert_allclose(session.run(x)["add_2"], want, rtol=1e-4, atol=1e-4)


def test_sessions_share_one_thread_pool_without_blocking() -> None:
    big, small = lathe.compile(graphs.mlp(hidden=900), threads=2), lathe.compile(graphs.mlp(hidden=16), threads=2)
    x = {"x": np.ones((400, 20), np.float32)}
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(session.run, x) for _ in range(50) for session in (big, small)]
        assert all(np.isfinite(run.result(timeout=60)["add_2"]).all() for run in runs)


def test_an_idle_thread_pool_uses_no_processor_time() -> None:
    lathe.compile(graphs.mlp(hidden=700), threads=2).run({"x": np.ones((300, 20), np.float32)})
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_native_code_releases_the_gil() -> None:
    session = lathe.compile(graphs.mlp(hidden=2000), threads=1)
    x = {"x": np.ones((4000, 20), np.float32)}
    ticks = 0
    runner = threading.Thread(target=lambda: [session.run(x) for _ in range(40)])
    runner.start()
    while runner.is_alive():
        ticks += 1
        time.sleep(0.0005)
    assert ticks > 2


def test_the_thread_pool_grows_and_never_shrinks() -> None:
    assert thread_pool(3).size >= 3 and thread_pool(1).size >= 3 and thread_pool(1) is thread_pool(2)


def test_the_quota_of_a_container_is_respected(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_cpus(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cpus(tmp_path) == available_cpus(tmp_path / "none")


LATER_RUNS = """
import os, sys
import numpy as np
import lathe
from lathe.core.runtime.host.thread_pool import thread_pool
from tests.core.runtime import graphs

session = lathe.compile(graphs.mlp(hidden=900), threads=2)  # long enough for both
x = {"x": np.ones((4000, 20), np.float32)}
want = session.run(x)["add_2"]
if sys.argv[1] == "fork":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    thread_pool().stop()
assert np.allclose(session.run(x)["add_2"], want)
sys.exit(0)  # not os._exit: what runs at a normal exit must not wait for ever
"""


@pytest.mark.sample(2, native=True)
@pytest.mark.parametrize("event", ["stop", "fork"])
def test_runs_continue_alone_without_workers(event: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LATER_RUNS, event]
    assert subprocess.run(command, cwd=Path(__file__).resolve().parents[3], timeout=60).returncode == 0
