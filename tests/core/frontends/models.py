"""Small ONNX models, and their answers from Lathe's reference executor and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from lathe.core.frontends.onnx import load
from lathe.core.reference import interpret

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any] | None],
    outputs: Sequence[str] = ("y",),
    *,
    constants: Mapping[str, Any] | None = None,
    opset: int = 21,
    dtype: int = FLOAT,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model; inputs are shapes by name, outputs carry no declared type."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()],
    )
    versions = [helper.make_opsetid("", opset), *(helper.make_opsetid(*item) for item in (domains or {}).items())]
    return helper.make_model(graph, opset_imports=versions, functions=list(functions), ir_version=10)


def ours(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    return interpret(load(proto.SerializeToString()), feeds)


def theirs(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def assert_agree(proto: onnx.ModelProto, feeds: Mapping[str, Any], tolerance: float = 1e-5) -> None:
    """Both engines give the same outputs."""
    mine, expected = ours(proto, feeds), theirs(proto, feeds)
    assert mine.keys() == expected.keys()
    for name, array in expected.items():
        assert (mine[name].shape, mine[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_allclose(mine[name], array, tolerance, tolerance)


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
