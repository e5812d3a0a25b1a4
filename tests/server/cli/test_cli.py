"""The command line as users call it: the real compiler, the real server, the bundled model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from lathe.server.cli.app import app
from lathe.server.client import Client
from tests.compiled_code import share_compiled_code
from tests.server.running import free_port
from tests.server.service import until

pytestmark = pytest.mark.timeout(600)
PATIENCE = 200  # seconds; the speed of a busy machine is not tested here
PROJECT = Path(__file__).parents[3]
DIGITS = PROJECT / "model_repo" / "digits"
SMALL, GOOD = str(DIGITS / "1" / "model.onnx"), str(DIGITS / "2" / "model.onnx")


def run_lathe(*arguments: str, fails: bool = False) -> str:
    """Run a command in this process; return its output."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert (result.exit_code != 0) == fails, result.output
    return result.output


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled models, shared by this file's servers."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A copy of the bundled repository, which must not be written."""
    shutil.copytree(PROJECT / "model_repo", tmp_path / "repo", ignore=shutil.ignore_patterns(".*"))
    return tmp_path / "repo"


@contextmanager
def server_process(repo: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `lathe serve` in a process of its own until the end of the block."""
    share_compiled_code(cache)
    port = free_port()
    command = [sys.executable, "-c", "from lathe.server.cli.app import app; app()", "serve"]
    process = subprocess.Popen(
        [*command, "--model-repo", str(repo), "--port", str(port), "--threads", "1"],
        cwd=PROJECT,
        env={**os.environ, "LATHE_CACHE_DIR": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or is_ready(url), PATIENCE)
        yield process, url
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def seconds_without_processor(process: subprocess.Popen[bytes]) -> float:
    """Seconds for which a process's threads were ready to run but had no processor."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads) / 1e9


def test_inspect_describes_a_model(tmp_path: Path) -> None:
    output = run_lathe("inspect", GOOD, "--explain", "--picture", str(tmp_path / "graph.svg"))
    assert "Conv" in (tmp_path / "graph.svg").read_text()
    assert "image" in output
    assert "float32[batch,1,8,8]" in output
    assert "batching: yes" in output


def test_run_and_bench(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", image=np.zeros((3, 1, 8, 8), np.float32))
    assert "[3, 10]" in run_lathe("run", GOOD, "--inputs", str(tmp_path / "in.npz"), "--threads", "1")
    assert "[5, 10]" in run_lathe("run", GOOD, "--batch", "5", "--threads", "1")
    output = run_lathe("bench", GOOD, "--batches", "1,4", "--seconds", "0.05", "--threads", "1")
    assert "rows/s" in output
    assert output.count(" ms") == 4


def test_a_compiled_file_runs_without_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_CACHE_DIR", str(tmp_path / "cache"))
    path = str(tmp_path / "digits.lathe")
    said = run_lathe("compile", GOOD, "-o", path, "--threads", "1", "--tune", "0.1", "--packing", "64")
    assert (
        "digits.lathe: " in said
        and "sequences are not packed: expected one dynamic dimension besides the batch" in said
    )
    monkeypatch.setattr("lathe.core.compiler.pipeline.build", None)  # nothing is compiled from here on
    assert "[5, 10]" in run_lathe("run", path, "--batch", "5", "--threads", "1")
    assert "float32[batch,1,8,8]" in run_lathe("inspect", path)
    explained = run_lathe("inspect", path, "--explain", "--batch", "4")
    assert "kernels (n = 4; one thread: " in explained
    assert "rows/s" in run_lathe("bench", path, "--batch", "1", "--seconds", "0.05")


def test_profile_shows_the_time_of_each_kernel(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    output = run_lathe("profile", GOOD, "--batch", "1,16", "--threads", "1", "--top", "2", "--trace", str(trace))
    for expected in ("batch 1, 1 threads", "batch 16, 1 threads", "GFLOP/s", "of peak: the least", "steps"):
        assert expected in output
    for size in (1, 16):
        events = json.loads((tmp_path / f"trace-{size}.json").read_text())["traceEvents"]
        assert len(events) > 2 and all(event["dur"] > 0 for event in events)


def test_a_record_repeats_a_compilation(tmp_path: Path) -> None:
    first, second = tmp_path / "first.lathe", tmp_path / "second.lathe"
    run_lathe("compile", GOOD, "-o", str(first), "--threads", "1", "--tune", "0.5")
    run_lathe("compile", GOOD, "-o", str(second), "--threads", "1", "--tune", "off", "--record", str(first))
    assert first.read_bytes() == second.read_bytes()


def test_an_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    for command in ("run", "inspect", "bench"):
        output = run_lathe(command, str(tmp_path / "bad.onnx"), fails=True)
        assert "error: " in output
        assert "Traceback" not in output
    (tmp_path / "bad.lathe").write_bytes(b"no model")
    assert "bad.lathe is not a compiled model" in run_lathe("run", str(tmp_path / "bad.lathe"), fails=True)
    assert "tune is 'much'" in run_lathe("compile", GOOD, "--tune", "much", fails=True)
    np.savez(tmp_path / "in.npz", wrong=np.zeros(3))
    assert "image" in run_lathe("run", GOOD, "--inputs", str(tmp_path / "in.npz"), fails=True)
    assert "expected numbers" in run_lathe("bench", GOOD, "--batches", "one", fails=True)
    assert "no such folder" in run_lathe("serve", "--model-repo", str(tmp_path / "none"), fails=True)
    assert "error: " in run_lathe("push", "m", GOOD, "--url", "http://127.0.0.1:1", fails=True)
    assert "error: " in run_lathe("rollback", "m", "--url", "http://127.0.0.1:1", fails=True)


@pytest.mark.slow
def test_push_and_roll_back_against_a_server(repo: Path, cache: Path) -> None:
    image = np.zeros((1, 1, 8, 8), np.float32)
    with server_process(repo, cache) as (process, url), Client(url) as client:
        assert client.infer("digits", {"image": image}).version == 2
        assert "version 3 is ready, not live yet" in run_lathe("push", "digits", SMALL, "--url", url)
        assert "version 4 is ready, live" in run_lathe("push", "digits", SMALL, "--promote", "--url", url)
        assert client.infer("digits", {"image": image}).version == 4
        assert "digits version 2 is live" in run_lathe("rollback", "digits", "--url", url)
        assert "digits version 1 is live" in run_lathe("rollback", "digits", "--to", "1", "--url", url)
        small = client.infer("digits", {"image": image})
        assert small.version == 1
        np.testing.assert_array_equal(
            small.outputs["probabilities"], client.infer("digits", {"image": image}, 4).outputs["probabilities"]
        )
        assert "version 1 is ready, live" in run_lathe("push", "new", GOOD, "--url", url)
        assert client.model("new").answering == {"live": 1}
        (repo / "bad.onnx").write_bytes(b"\x08\x07no model")
        assert "error: " in run_lathe("push", "digits", str(repo / "bad.onnx"), "--url", url, fails=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_after_a_kill_during_an_upload_it_is_ready_within_five_seconds(repo: Path, cache: Path) -> None:
    with server_process(repo, cache) as (process, url), Client(url) as client:
        client.rollback("digits")
        client.upload("digits", Path(SMALL), key="pushed")
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            head = b"POST /api/v1/models/digits/versions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
            connection.sendall(head + b"\x08" * (3 << 20))
            until(lambda: list(repo.glob(".lathe/staging/*/*/model.onnx")))
            process.kill()
            process.wait()
    started = time.monotonic()
    with server_process(repo, cache) as (process, url), Client(url) as client:
        assert time.monotonic() - started - seconds_without_processor(process) < 5
        assert client.infer("digits", {"image": np.zeros((1, 1, 8, 8), np.float32)}).version == 1
        assert client.upload("digits", Path(SMALL), key="pushed").replayed
        assert client.model("digits").versions == [1, 2, 3]
        assert not list(repo.glob(".lathe/staging/*/*/*"))
