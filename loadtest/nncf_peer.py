"""NNCF with OpenVINO as a peer of `python -m loadtest compression`: a module for a Python that has both.

The process reads one request per line, a JSON list, and answers each with one line of JSON:

    ["make", METHOD, MODEL.onnx, CALIBRATION.npz, FILE]   writes the compressed model; CALIBRATION.npz has the input `x`
    ["run", FILE, ROWS.npy, SCORES.npy]                   writes the first output for these rows
    ["time", FILE, ROWS.npy, CALLS]                       answers with the mean processor seconds of a call, one thread

A FILE is a zip archive, not deflated, of the two files of OpenVINO's format. METHOD is one of `METHODS`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_PARTS = ("model.xml", "model.bin")
_HINTS = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
_GROUP = 32  # weights that share a scale, where the depth of a product permits it

# The options of `nncf.compress_weights` besides those of 4 bits; None is `nncf.quantize`.
METHODS: Mapping[str, Mapping[str, Any] | None] = {
    "static": None,
    "weights of 4 bits: nearest": {},
    "weights of 4 bits: GPTQ": {"gptq": True},
}


class _Peer:
    def __init__(self) -> None:
        self._openvino: Any = import_module("openvino")
        self._nncf: Any = import_module("nncf")
        self._core = self._openvino.Core()
        self._requests: dict[str, Any] = {}
        versions = {"openvino": self._openvino.__version__, "nncf": self._nncf.__version__}
        self.requests: dict[str, Callable[..., Any]] = {
            "versions": lambda: versions,
            "make": self.make,
            "run": self.run,
            "time": self.time,
        }

    def make(self, method: str, model: str, calibration: str, file: str) -> None:
        rows = np.load(calibration)["x"]
        data = self._nncf.Dataset([{"x": rows[row : row + 1]} for row in range(len(rows))])
        exact, options = self._core.read_model(model), METHODS[method]
        if options is None:
            small = self._nncf.quantize(exact, data)
        else:
            fallback = self._nncf.GroupSizeFallbackMode.ADJUST
            advanced = self._nncf.AdvancedCompressionParameters(group_size_fallback_mode=fallback)
            common = {"mode": self._nncf.CompressWeightsMode.INT4_ASYM, "group_size": _GROUP, "ratio": 1.0}
            given = {"dataset": data} if options else {}
            small = self._nncf.compress_weights(
                exact, **common, **options, **given, all_layers=True, advanced_parameters=advanced
            )
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(file, "w") as archive:
            self._openvino.save_model(small, str(Path(folder) / _PARTS[0]), compress_to_fp16=False)
            for part in _PARTS:
                archive.write(Path(folder) / part, part)

    def run(self, file: str, rows: str, scores: str) -> None:
        np.save(scores, self._request(file).infer({"x": np.load(rows)})[0])

    def time(self, file: str, rows: str, calls: int) -> float:
        request, feeds = self._request(file), {"x": np.load(rows)}
        request.infer(feeds)  # the shapes may be new
        start = time.process_time()
        for _ in range(calls):
            request.infer(feeds, share_inputs=True)
        return (time.process_time() - start) / calls

    def _request(self, file: str) -> Any:
        if file not in self._requests:
            with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(file) as archive:
                archive.extractall(folder)
                model = self._core.read_model(str(Path(folder) / _PARTS[0]))
                self._requests[file] = self._core.compile_model(model, "CPU", _HINTS).create_infer_request()
        return self._requests[file]


def main() -> None:
    peer = _Peer()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps({"answer": peer.requests[name](*arguments)}), flush=True)


if __name__ == "__main__":
    main()
