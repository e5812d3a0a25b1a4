"""Whole models against ONNX Runtime: one session for every batch size, no node on the reference, every target."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import lathe
from loadtest import zoo

ROOT = Path(__file__).resolve().parents[2]
MODELS = ["lenet", "mlp", "resnet", "mobilenet", "transformer"]

# Run in a process of its own, because a process has one target: prints the largest error over the batches.
OTHER_TARGET = """
import sys, numpy as np, lathe
from loadtest import zoo
model = zoo.model(sys.argv[1]).SerializeToString()
graph, session = lathe.load(model), lathe.compile(model, threads=2, max_batch=4)
worst = 0.0
for rows in (1, 3):
    feeds = {"x": zoo.sample(sys.argv[1], rows)}
    got, want = session.run(feeds)["y"], lathe.interpret(graph, feeds)["y"]
    worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
assert " 0 on the reference" in session.explain(), session.explain()
print(worst)
"""


def expected(model: bytes, x: np.ndarray) -> np.ndarray:
    return np.asarray(ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0])


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape and got.dtype == want.dtype
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(5)
def test_one_session_agrees_with_onnx_runtime_at_every_batch_size(name: str) -> None:
    model = zoo.model(name).SerializeToString()
    for threads in (1, 2):
        with lathe.compile(model, threads=threads, max_batch=8) as session:
            assert " 0 on the reference" in session.explain()
            assert session.batching.batchable, session.batching.reason
            for rows in (1, 2, 3, 8, 11):
                x = zoo.sample(name, rows)
                assert relative_error(session.run({"x": x})["y"], expected(model, x)) < 1e-4


@pytest.mark.sample(4)
@pytest.mark.parametrize("target", ["x86-64-v3", "plain"])
@pytest.mark.parametrize("name", ["lenet", "mobilenet", "transformer"])
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "AMD64"), reason="these are x86-64 targets")
def test_other_targets_run_here_and_agree(name: str, target: str) -> None:
    environment = {**os.environ, "LATHE_TARGET": target, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_TARGET, name],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4


def test_rows_of_a_batch_do_not_depend_on_their_neighbours() -> None:
    model = zoo.model("transformer").SerializeToString()
    session = lathe.compile(model, threads=2)
    x = zoo.sample("transformer", 8)
    poisoned = x.copy()
    poisoned[3] = np.nan
    together = session.run({"x": poisoned})["y"]
    for row in (0, 2, 4, 7):
        alone = session.run({"x": x[row : row + 1]})["y"]
        np.testing.assert_allclose(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)
    assert np.isnan(together[3]).all()


def test_closing_a_session_gives_its_memory_back() -> None:
    """80 MB of weights and an arena; after closing less than a tenth of that memory is left."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((2048, 2048), np.float32), f"w{i}") for i in range(5)]
    nodes = [helper.make_node("MatMul", ["x" if i == 0 else f"h{i}", f"w{i}"], [f"h{i + 1}"]) for i in range(5)]
    graph = helper.make_graph(
        nodes,
        "heavy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2048])],
        [helper.make_tensor_value_info("h5", TensorProto.FLOAT, ["n", 2048])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    x = rng.standard_normal((64, 2048), np.float32)
    lathe.compile(model, threads=1).close()  # one-time allocations stay
    before = resident()
    session = lathe.compile(model, threads=1)
    session.run({"x": x})
    held = resident() - before
    session.close()
    del session
    gc.collect()
    assert held > 60e6, "the model was expected to be larger"
    assert resident() - before < 0.1 * held


def resident() -> int:
    """Bytes of this process in physical memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
