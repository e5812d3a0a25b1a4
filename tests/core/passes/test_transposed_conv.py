"""Transposed convolutions of every kind, as plain ones or products: compiled, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import lathe

# Kernel, and attributes other than the defaults. X has 4 channels and 5 pixels along every axis.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "windows side by side": ((2, 2), {"strides": [2, 2]}),
    "room behind windows side by side": ((2, 2), {"strides": [2, 2], "output_padding": [1, 1]}),
    "another stride along either axis": ((2, 3), {"strides": [2, 3]}),
    "overlapping windows": ((4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "three by two": ((3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    "an odd number of results": ((3, 3), {"strides": [2, 2]}),
    "gaps between windows": ((2, 2), {"strides": [3, 3]}),
    "stride one": ((3, 3), {"pads": [0, 1, 2, 0]}),
    "groups": ((3, 3), {"strides": [2, 2], "group": 2}),
    "every channel for itself": ((4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 4}),
    "a given output shape": ((3, 3), {"strides": [2, 2], "output_shape": [9, 10], "auto_pad": "SAME_UPPER"}),
    "a line": ((3,), {"strides": [3]}),
    "a line with overlap": ((8,), {"strides": [4], "pads": [2, 2]}),
    "a volume": ((2, 2, 2), {"strides": [2, 2, 2]}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_onnx_runtime(case: str) -> None:
    kernel, attrs = CASES[case]
    model = _model(kernel, attrs, bias=len(case) % 2 == 0)
    session = lathe.compile(model, threads=1)
    assert "FALLBACK" not in session.explain()
    oracle = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    for rows in (1, 3):
        x = np.random.default_rng(rows).standard_normal((rows, 4, *(5 for _ in kernel)), np.float32)
        [want] = oracle.run(None, {"x": x})
        np.testing.assert_allclose(session.run({"x": x})["y"], want, rtol=1e-4, atol=1e-5)


def test_kernels_with_holes_stay_on_the_reference() -> None:
    model = _model((3, 3), {"dilations": [2, 2]}, bias=False)
    x = np.random.default_rng(0).standard_normal((2, 4, 5, 5), np.float32)
    session = lathe.compile(model, threads=1)
    assert "FALLBACK" in session.explain()
    [want] = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(session.run({"x": x})["y"], want, rtol=1e-4, atol=1e-5)


def _model(kernel: tuple[int, ...], attrs: dict[str, Any], bias: bool) -> bytes:
    rng, columns = np.random.default_rng(len(kernel)), 6 // int(attrs.get("group", 1)) if attrs.get("group") != 4 else 1
    weight = rng.standard_normal((4, columns, *kernel), np.float32)
    shift = rng.standard_normal(columns * int(attrs.get("group", 1)), np.float32)
    names = ["x", "w", "b"] if bias else ["x", "w"]
    graph = helper.make_graph(
        [helper.make_node("ConvTranspose", names, ["y"], **attrs)],
        "one",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4, *(5 for _ in kernel)])],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(weight, "w"), *([numpy_helper.from_array(shift, "b")] if bias else [])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
