"""`NncfProcess`: compresses models with NNCF, and runs them in OpenVINO, in a process of another Python."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.nncf_peer import METHODS

__all__ = ["METHODS", "NncfProcess"]


class NncfProcess:
    """The process of `loadtest.nncf_peer`. `python` is a Python that has openvino and nncf."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "loadtest.nncf_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self._folder = tempfile.TemporaryDirectory()
        self._files = 0
        self.versions: Mapping[str, str] = self._ask("versions")

    def make(self, method: str, model: bytes, calibration: NDArray[Any]) -> bytes:
        """The file of the compressed `model`, an ONNX file with the input `x`, by one of `METHODS`."""
        exact, rows, small = self._path("exact.onnx"), self._path("calibration.npz"), self._path("small.zip")
        exact.write_bytes(model)
        np.savez(rows, x=calibration)
        self._ask("make", method, exact, rows, small)
        return small.read_bytes()

    def open(self, file: bytes) -> Path:
        """A path of a compressed model, for `run` and `seconds`."""
        self._files += 1
        path = self._path(f"{self._files}.zip")
        path.write_bytes(file)
        return path

    def run(self, path: Path, x: NDArray[Any]) -> NDArray[Any]:
        """The scores of these rows."""
        np.save(self._path("rows.npy"), x)
        self._ask("run", path, self._path("rows.npy"), self._path("scores.npy"))
        scores: NDArray[Any] = np.load(self._path("scores.npy"))
        return scores

    def seconds(self, path: Path, x: NDArray[Any], calls: int) -> float:
        """The mean processor seconds of a call on one thread."""
        np.save(self._path("rows.npy"), x)
        return float(self._ask("time", path, self._path("rows.npy"), calls))

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _ask(self, *request: Any) -> Any:
        """The answer to a request: the next line that is JSON, as NNCF prints its progress as well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"answer"'):
                return json.loads(line)["answer"]
        raise SystemExit(f"{self._process.args!r} ended with status {self._process.wait()}")
