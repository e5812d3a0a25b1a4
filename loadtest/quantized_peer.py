"""OpenVINO with NNCF as a peer of `python -m loadtest quantized`: a module for a Python that has both.

Arguments: MODEL.onnx CALIBRATION.npz THREADS, and `transformer` or `convolutions`. CALIBRATION.npz has the inputs of
the model, each with a first axis of calibration rows. The process quantizes the model with NNCF's defaults. It reads
one request per line, JSON `[feeds.npz, seconds, quantized]`, runs the feeds for so long, and answers with the median
milliseconds of a run, the relative error of the quantized model's first output, and its version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from loadtest.timing import relative_error, slice_ms


def main(path: str, calibration: str, threads: int, kind: str) -> None:
    openvino: Any = import_module("openvino")
    nncf: Any = import_module("nncf")
    core = openvino.Core()
    exact = core.read_model(path)
    given = dict(np.load(calibration))
    model_type = nncf.ModelType.TRANSFORMER if kind == "transformer" else None
    small = nncf.quantize(exact, nncf.Dataset(list(_rows(given))), model_type=model_type)
    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}

    def request(model: Any, feeds: dict[str, Any]) -> Any:
        fixed = model.clone()
        fixed.reshape({name: list(array.shape) for name, array in feeds.items()})
        return core.compile_model(fixed, "CPU", hints).create_infer_request()

    requests: dict[str, list[Any]] = {}
    print(json.dumps({"openvino": openvino.__version__, "nncf": nncf.__version__}), flush=True)
    for line in sys.stdin:
        file, seconds, quantized = json.loads(line)
        feeds = dict(np.load(file))
        if file not in requests:
            requests[file] = [request(model, feeds) for model in (exact, small)]
        results = [each.infer(feeds)[0].copy() for each in requests[file]]
        chosen = requests[file][int(quantized)]
        ms = slice_ms(partial(chosen.infer, feeds, share_inputs=True), seconds)
        print(json.dumps({"ms": ms, "error": relative_error(results[1], results[0])}), flush=True)


def _rows(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in range(len(next(iter(given.values())))):
        yield {name: array[row : row + 1] for name, array in given.items()}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
