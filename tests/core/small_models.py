"""Small ONNX models as text, run by Lathe and by ONNX Runtime without its optimizations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser

import lathe
from tests.onnx_runtime import plain_session

OPSET = 18


def model(signature: str, body: str, constants: str = "", opset: int = OPSET) -> bytes:
    """The bytes of a model. `signature`: `float[N,4] x => float[N,4] y`; `constants`: `int64[1] one = {1}, ...`."""
    given, _, results = signature.partition("=>")
    head = f'<ir_version: 8, opset_import: ["": {opset}]>'
    text = f"{head} g ({given}) => ({results}) <{constants}> {{ {body} }}"
    return bytes(onnx.parser.parse_model(text).SerializeToString())


def untyped(data: bytes) -> bytes:
    """The model without declared types of its outputs."""
    proto = onnx.load_from_string(data)
    for value in proto.graph.output:
        value.ClearField("type")
    return bytes(proto.SerializeToString())


def theirs(data: bytes, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of ONNX Runtime, by name."""
    session = plain_session(data)
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


def assert_like_onnx_runtime(data: bytes, *runs: Mapping[str, Any], threads: int = 1, tolerance: float = 1e-4) -> None:
    """One session gives ONNX Runtime's shapes, types and values for every set of feeds."""
    with lathe.compile(data, threads=threads, tune="off", new_shapes="wait") as session:
        for feeds in runs:
            got, want = session.run(feeds), theirs(data, feeds)
            shapes = {name: array.shape for name, array in feeds.items()}
            for name, array in want.items():
                assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype), f"{name} for {shapes}"
                np.testing.assert_allclose(got[name], array, tolerance, tolerance, err_msg=f"{name} for {shapes}")


def normal(*shape: int, seed: int = 0) -> Any:
    """Random numbers of float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
