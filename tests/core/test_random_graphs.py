"""Random graphs through the whole compiler, against the interpreter and ONNX Runtime, at several batch sizes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lathe
from lathe.core.frontends.export import export
from lathe.core.ir.graph import Graph
from tests.core.random_nets import Net, feeds
from tests.onnx_runtime import NotImplementedByOnnxRuntime, plain_session

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (2, 0, 5, 1)
_TOLERANCE = 2e-4
_LEAST_SCALE = 0.05  # values far below this are rounding errors of larger ones

# Run in a process of its own, because a process has one target.
OTHER_TARGET = """
import sys
from tests.core.test_random_graphs import check_seeds
check_seeds(int(sys.argv[1]), int(sys.argv[2]))
"""


def assert_close(got: np.ndarray, want: np.ndarray, label: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), label
    scale = max(float(np.abs(want).max(initial=0)), _LEAST_SCALE)
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=_TOLERANCE, err_msg=label)


def check(graph: Graph, threads: int, max_batch: int, seed: int = 0) -> None:
    """One session agrees with the interpreter at every batch size, and with ONNX Runtime at one."""
    with lathe.compile(graph, threads=threads, max_batch=max_batch, tune="off") as session:
        for rows in BATCHES:
            given = feeds(graph, rows, seed)
            got, want = session.run(given), lathe.interpret(graph, given)
            assert list(got) == list(want)
            for name, array in want.items():
                assert_close(got[name], array, f"{name} of {rows} rows")
        given = feeds(graph, BATCHES[0], seed)
        got = session.run(given)
    for name, array in onnx_runtime(graph, given).items():
        assert_close(got[name], array, f"{name} against ONNX Runtime")


def onnx_runtime(graph: Graph, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """ONNX Runtime's outputs for the exported graph, without optimizations.

    Empty if Swish, for which it has no kernel, meets an operator of opset 26: it expands only older functions.
    """
    try:
        session = plain_session(export(graph))
    except NotImplementedByOnnxRuntime as error:
        if "Swish(24)" not in str(error):
            raise
        return {}
    used = {port.name: given[port.name] for port in session.get_inputs()}
    return dict(zip([port.name for port in session.get_outputs()], session.run(None, used), strict=True))


def check_seeds(first: int, last: int) -> None:
    """Check the graphs of these seeds; the error names the seed."""
    for seed in range(first, last):
        choices = random.Random(seed)
        graph = Net(choices.randrange).grow(steps=2 + seed % 18)
        try:
            check(graph, 1 + seed % 3, choices.choice((1, 4, 32)), seed)
        except Exception as error:
            raise AssertionError(f"the graph of seed {seed}") from error


def drawn(data: st.DataObject) -> None:
    """Check a graph that hypothesis chooses, and can shrink."""

    def choose(count: int) -> int:
        return data.draw(st.integers(0, count - 1))

    graph = Net(choose).grow(steps=1 + choose(10))
    check(graph, threads=1 + choose(3), max_batch=(1, 4, 32)[choose(3)])


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_compiled_graphs_agree(data: st.DataObject) -> None:
    drawn(data)


@pytest.mark.slow
def test_long_compiled_graphs_agree() -> None:
    check_seeds(0, 40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_compiled_graphs_agree(data: st.DataObject) -> None:
    drawn(data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["x86-64-v3", "plain"])
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "AMD64"), reason="these are x86-64 targets")
def test_other_targets_agree(target: str) -> None:
    environment = {**os.environ, "LATHE_TARGET": target, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OTHER_TARGET, "1000", "1120"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
