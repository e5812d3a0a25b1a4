"""ONNX Runtime as the peer of a comparison, on one thread with all optimizations; and the error of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def onnx_runtime(model: Path | bytes, threads: int = 1) -> Any:
    """A session of ONNX Runtime with default options, on `threads` threads. `model`: a file, or its content."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    return ort.InferenceSession(
        model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"]
    )


def largest_error(mine: Mapping[str, Any], other: Sequence[Any]) -> float:
    """The largest error of an output: its largest difference, divided by the largest magnitude in `other`'s output.

    The difference itself if that output is 0 everywhere; 0 without outputs. Outputs are compared in their order;
    ValueError if their numbers differ. Infinite if shapes, dtypes, strings, maps, infinities or NaNs differ.
    """
    return max((_error(a, b) for a, b in zip(mine.values(), other, strict=True)), default=0.0)


def _error(mine: Any, other: Any) -> float:
    if not isinstance(other, np.ndarray) or other.dtype.kind not in "fiub":
        return 0.0 if str(np.asarray(mine).tolist()) == str(np.asarray(other).tolist()) else float("inf")
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return float("inf")
    a, b = mine.astype(np.float64), other.astype(np.float64)
    at = np.isfinite(b)
    if not np.array_equal(a[~at], b[~at], equal_nan=True) or not np.isfinite(a[at]).all():
        return float("inf")
    largest = np.abs(b[at]).max(initial=0.0)
    apart = np.abs(a[at] - b[at]).max(initial=0.0)
    return float(apart / largest) if largest else float(apart)
