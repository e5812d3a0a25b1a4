"""Measures how long a server takes to become ready: with an empty cache, and again after it was killed.

    python -m loadtest starting [--models N] [--json FILE]

N distinct small models are copied into a fresh repository. `cold` is the time from the start of the server until
`/v2/health/ready` answers 200. Then the server is killed (SIGKILL), and `again` is that time with a filled cache. At
the same time an idle process wakes every 20 ms (see stalls.py). The sum of its delays is the time that other processes
took, and is subtracted. Processor time is that of the server and its child processes. Exit status 1 if one of the two
is longer than promised.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODELS, COLD, AGAIN = 50, 30.0, 5.0  # number of models; promised seconds for them
EVERY, PATIENCE = 0.02, 1800.0


@dataclass(frozen=True, slots=True)
class Start:
    """The seconds of one start, `name` ("cold" or "again").

    `clock` is wall time, `corrected` is wall time less the delays of an idle process, `processor` is the processor time
    of the server and its ended children. `promised` is the limit of `corrected`.
    """

    name: str
    clock: float
    corrected: float
    processor: float
    promised: float


def write_models(repository: Path, count: int) -> None:
    """Write `count` distinct models with one hidden layer into a repository."""
    for number in range(count):
        folder = repository / f"small-{number:03d}" / "1"
        folder.mkdir(parents=True)
        onnx.save(small_model(number), folder / "model.onnx")


def small_model(number: int) -> onnx.ModelProto:
    random, width = np.random.default_rng(number), 16 + number % 8

    def weights(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)

    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Add", ["a", "b1"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "w2"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    constants = [weights("w1", width, 32), weights("b1", 32), weights("w2", 32, 4)]
    graph = helper.make_graph(nodes, f"small {number}", [given], [made], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(count: int) -> list[Start]:
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        write_models(repository, count)
        return [
            _start(repository, "cold", COLD * count / MODELS),
            _start(repository, "again", AGAIN * max(1.0, count / MODELS)),
        ]


def _start(repository: Path, name: str, promised: float) -> Start:
    """Start a server, wait until it is ready, and kill it."""
    command = [sys.executable, "-m", "loadtest.stalls"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
        began = time.monotonic()
        with _server(repository) as (process, port):
            _until_ready(process, port)
            clock, processor = time.monotonic() - began, _processor_time(process.pid)
        lates = json.loads(idle.communicate()[0])
    late = sum(wait for at, wait in lates if began <= at < began + clock)
    return Start(name, clock, clock - late, processor, promised)


@contextmanager
def _server(repository: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    others = {name: value for name, value in os.environ.items() if not name.startswith("LATHE_")}
    environment = {**others, "LATHE_MODEL_REPO": str(repository), "LATHE_PORT": str(port)}
    command = [sys.executable, "-c", "from lathe.server.cli.app import app; app()", "serve"]
    log = repository.parent / "log.txt"
    with log.open("ab") as written:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=written)
    try:
        yield process, port
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {log.read_text(errors='replace')[-2000:]}") from error
    finally:
        process.kill()
        process.wait()


def _until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Poll every 20 ms until the server is ready. RuntimeError if it exits or is not ready within PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            if process.poll() is not None:
                raise RuntimeError(f"the server exited with status {process.returncode}") from None
        finally:
            connection.close()
        time.sleep(EVERY)
    raise RuntimeError(f"the server was not ready after {PATIENCE:g} s")


def _processor_time(pid: int) -> float:
    """Processor seconds of a process and of its children that have ended."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest starting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=MODELS, help=f"number of models (default {MODELS})")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    starts = measure(chosen.models)
    for start in starts:
        print(
            f"{start.name}: ready after {start.clock:.1f} s, {start.corrected:.1f} s without others' time, "
            f"{start.processor:.1f} s of the processors (promised: {start.promised:g} s)"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(start) for start in starts], indent=1) + "\n")
    return 0 if all(start.corrected <= start.promised for start in starts) else 1


if __name__ == "__main__":
    sys.exit(main())
