"""A model of more than 2 GB is pushed, compiled and served, and no process holds it in memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from lathe.server.client import Client
from tests.server.cli.test_cli import PROJECT, is_ready
from tests.server.running import free_port
from tests.server.service import until

ROWS, COLUMNS = 560_000, 1024  # 2.3 GB of float32: more than a protobuf message can be
MEMORY = 1 << 30  # bytes that each process may allocate, without memory-mapped files
COMMAND = [sys.executable, "-c", "from lathe.server.cli.app import app; app()"]


def write_model(folder: Path) -> Path:
    """Sums of three rows of a table; only the last row is not zero, the others are a hole in the file."""
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[ROWS, COLUMNS])
    table.data_location = TensorProto.EXTERNAL
    table.external_data.add(key="location", value="table.bin")
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("ReduceSum", ["rows", "axes"], ["y"], keepdims=0),
        ],
        "sums",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", COLUMNS])],
        [table, helper.make_tensor("axes", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with (folder / "table.bin").open("wb") as file:
        file.seek((ROWS - 1) * COLUMNS * 4)
        file.write(np.arange(COLUMNS, dtype=np.float32).tobytes())
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def set_limit() -> None:
    """Limit the memory of this process and all its children."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


@contextmanager
def server(repo: Path) -> Iterator[str]:
    port = free_port()
    with (repo.parent / "log").open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--model-repo", str(repo), "--port", str(port), "--threads", "1"],
            cwd=PROJECT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, stdout=log, stderr=log, preexec_fn=set_limit,
        )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or is_ready(f"http://127.0.0.1:{port}"), 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_more_than_two_gigabytes_is_served(tmp_path: Path) -> None:
    model, repo = write_model(tmp_path), tmp_path / "repo"
    repo.mkdir()
    with server(repo) as url:
        pushed = subprocess.run(
            [*COMMAND, "push", "sums", str(model), "--url", url],
            cwd=PROJECT, preexec_fn=set_limit, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "sums version 1 is ready, live" in pushed.stdout, pushed.stdout + pushed.stderr
        with Client(url, timeout=60) as client:
            answer = client.infer("sums", {"ids": np.int64([[0, ROWS - 1, ROWS - 1], [1, 2, 3]])})
            np.testing.assert_array_equal(answer.outputs["y"], [2 * np.arange(COLUMNS), np.zeros(COLUMNS)])
    assert (repo / "sums" / "1" / "weights.bin").stat().st_size == ROWS * COLUMNS * 4
