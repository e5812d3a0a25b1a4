"""Scan against ONNX Runtime: axes, directions, several states, and the batched form of opset 8."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import lathe
from lathe.core.errors import ModelError

SUM = """
<ir_version: 8, opset_import: ["" : {opset}]>
agraph ({inputs}) => ({outputs})
{{
    y, z = Scan {call} <num_scan_inputs = 1{attrs}, body = sums (float[2] sum_in, float[2] next)
        => (float[2] sum_out, float[2] row)
    {{
        sum_out = Add(sum_in, next)
        row = Mul(sum_out, next)
    }}>
}}
"""


def model(attrs: str, x: str, z: str) -> bytes:
    text = SUM.format(
        opset=17, inputs=f"float[2] s, float{x} x", outputs=f"float[2] y, float{z} z", call="(s, x)", attrs=attrs
    )
    return bytes(onnx.parser.parse_model(text).SerializeToString())


def both(data: bytes, feeds: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return list(lathe.interpret(lathe.load(data), feeds).values()), list(session.run(None, feeds))


@pytest.mark.parametrize(
    ("attrs", "x", "z"),
    [
        ("", (5, 2), "[5,2]"),
        (", scan_input_directions = [1]", (5, 2), "[5,2]"),
        (", scan_output_directions = [1]", (5, 2), "[5,2]"),
        (", scan_input_axes = [1]", (2, 4), "[4,2]"),
        (", scan_input_axes = [-1], scan_output_axes = [1]", (2, 4), "[2,4]"),
        (", scan_output_axes = [-1], scan_input_directions = [1]", (3, 2), "[2,3]"),
    ],
)
def test_axes_and_directions(attrs: str, x: tuple[int, int], z: str) -> None:
    feeds = {
        "s": np.array([1, -1], np.float32),
        "x": np.random.default_rng(3).standard_normal(x).astype(np.float32),
    }
    for ours, theirs in zip(*both(model(attrs, str(list(x)), z), feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-6, 1e-6)


def test_the_length_follows_from_the_types() -> None:
    graph = lathe.load(model("", "[n,2]", "[m,2]"))
    assert [str(value.type) for value in graph.outputs] == ["float32[2]", "float32[n,2]"]


def test_a_scan_of_length_zero_returns_the_initial_states() -> None:
    feeds = {"s": np.array([1, -1], np.float32), "x": np.zeros((0, 2), np.float32)}
    y, z = lathe.interpret(lathe.load(model("", "[n,2]", "[m,2]")), feeds).values()
    assert y.tolist() == [1, -1]
    assert z.shape == (0, 2)


def test_a_batch_with_lengths_of_their_own() -> None:
    text = SUM.format(
        opset=8,
        inputs="int64[2] n, float[2,2] s, float[2,3,2] x",
        outputs="float[2,2] y, float[2,3,2] z",
        call="(n, s, x)",
        attrs=", directions = [1]",
    )
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    feeds = {"n": np.array([3, 2]), "s": np.zeros((2, 2), np.float32), "x": x}
    graph = lathe.load(bytes(onnx.parser.parse_model(text).SerializeToString()))
    y, z = lathe.interpret(graph, feeds).values()
    np.testing.assert_array_equal(y, [x[0].sum(axis=0), x[1, :2].sum(axis=0)])
    np.testing.assert_array_equal(z[0, 0], x[0, 2] * x[0, 2])
    np.testing.assert_array_equal(z[1, 2], [0, 0])


def test_refuses_inputs_that_do_not_fit_the_body() -> None:
    proto = onnx.load_from_string(model("", "[5,2]", "[5,2]"))
    next(a for a in proto.graph.node[0].attribute if a.name == "num_scan_inputs").i = 3
    with pytest.raises(ModelError, match="3 of them scanned"):
        lathe.load(proto.SerializeToString())
