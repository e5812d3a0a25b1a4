"""ONNX Runtime as an oracle: one thread, no optimizations, and the errors with which it refuses a model or a run."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as _state

# Its Python interface raises RuntimeError for element types that it cannot convert.
NotImplementedByOnnxRuntime = _state.NotImplemented
REFUSALS = (
    _state.Fail,
    _state.RuntimeException,
    _state.NotImplemented,
    _state.InvalidArgument,
    _state.InvalidGraph,
    RuntimeError,
)
# The largest signed weight that ONNX Runtime multiplies exactly on every CPU. Without AVX512-VNNI or AVX-VNNI it adds
# pairs of products of an unsigned and a signed byte in 16 bits, which saturate: 2 * 255 * 64 still fits.
SEVEN_BITS = 64


def plain_session(model: bytes | Path) -> ort.InferenceSession:
    """A session that runs the nodes of a model (bytes or a file) without optimizations. Raises one of REFUSALS."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # a memory pattern is planned for one shape, and the sessions see several
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
