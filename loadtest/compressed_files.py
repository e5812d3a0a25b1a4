"""`open_file`: runs the file of a compressed model in the engine that it is for, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from loadtest.nncf_process import NncfProcess
from loadtest.onnx_runtime_peer import onnx_runtime

Engine = Literal["lathe", "onnxruntime", "openvino"]
_ROWS = 1000  # of a run


class OpenFile(Protocol):
    """A model that is ready to run."""

    def run(self, x: NDArray[Any]) -> NDArray[Any]:
        """The scores of rows."""
        ...

    def seconds(self, x: NDArray[Any], calls: int) -> float:
        """The mean processor seconds of a call."""
        ...

    def close(self) -> None: ...


def open_file(model: bytes, engine: Engine, nncf: NncfProcess | None) -> OpenFile:
    """The model of a file; `nncf` is the process for files of OpenVINO."""
    match engine:
        case "lathe":
            return _in_lathe(model)
        case "onnxruntime":
            return _in_onnx_runtime(model)
        case "openvino":
            assert nncf is not None, "its methods are left out without it"
            return _InOpenVino(nncf, nncf.open(model))


def hits(file: OpenFile, x: NDArray[Any], y: NDArray[np.int64]) -> int:
    """How many rows get their class as the highest score."""
    parts = [slice(start, start + _ROWS) for start in range(0, len(x), _ROWS)]
    return sum(int((file.run(x[part]).argmax(axis=1) == y[part]).sum()) for part in parts)


class _InThisProcess:
    def __init__(self, run: Callable[[NDArray[Any]], NDArray[Any]], close: Callable[[], None]) -> None:
        self.run, self.close = run, close

    def seconds(self, x: NDArray[Any], calls: int) -> float:
        self.run(x)
        start = time.thread_time()
        for _ in range(calls):
            self.run(x)
        return (time.thread_time() - start) / calls


def _in_lathe(model: bytes) -> _InThisProcess:
    import lathe

    session = lathe.compile(model, threads=1, tune="off")
    return _InThisProcess(lambda x: next(iter(session.run({"x": x}).values())), session.close)


def _in_onnx_runtime(model: bytes) -> _InThisProcess:
    theirs = onnx_runtime(model)
    return _InThisProcess(lambda x: theirs.run(None, {"x": x})[0], lambda: None)


class _InOpenVino:
    def __init__(self, process: NncfProcess, path: Path) -> None:
        self._process, self._path = process, path

    def run(self, x: NDArray[Any]) -> NDArray[Any]:
        return self._process.run(self._path, x)

    def seconds(self, x: NDArray[Any], calls: int) -> float:
        return self._process.seconds(self._path, x, calls)

    def close(self) -> None:
        """The process keeps the model until it ends."""
