"""Sizes that models compute in floating-point numbers, or clamp, are known before a run: as EnCodec pads its input, as
DeBERTa cuts its table of positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import core

Feeds = dict[str, np.ndarray[Any, Any]]


def model(nodes: list[onnx.NodeProto], inputs: dict[str, list[Any]], rank: int, **constants: Any) -> bytes:
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
        weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def node(op: str, inputs: str, output: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attrs)


def padded_to_a_stride(stride: int) -> bytes:
    """x [n, 3, l] padded behind, so that windows of 5 in steps of `stride` reach all of it, and a convolution."""
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape two", "length"),
        node("Sub", "length five", "apart"),
        node("Cast", "apart", "number", to=TensorProto.FLOAT),
        node("Div", "number stride", "quotient"),
        node("Add", "quotient one", "windows"),
        node("Ceil", "windows", "above"),
        node("Cast", "above", "count", to=TensorProto.INT64),
        node("Sub", "count one_i", "steps"),
        node("Mul", "steps stride_i", "moved"),
        node("Add", "moved five", "ideal"),
        node("Sub", "ideal length", "missing"),
        node("Unsqueeze", "missing axis", "missing_1"),
        node("Concat", "zeros missing_1", "pads", axis=0),
        node("Pad", "x pads", "longer"),
        node("Conv", "longer w", "z", strides=[stride]),
        node("Relu", "z", "y"),
    ]
    w = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
    numbers = {"stride": np.float32(stride), "one": np.float32(1), "five": np.int64(5), "two": np.int64(2)}
    axis, zeros = np.array([0]), np.zeros(5, np.int64)
    more = {"stride_i": np.int64(stride), "one_i": np.int64(1), "axis": axis, "zeros": zeros, "w": w}
    return model(nodes, {"x": ["n", 3, "l"]}, 3, **numbers, **more)


def cut_around_the_middle() -> bytes:
    """table[16 - m : 16 + m] of 32 rows, m the smaller one of 16 and the length of x [n, l], times x."""
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape one", "length"),
        node("Min", "length sixteen", "m"),
        node("Sub", "sixteen m", "begin"),
        node("Add", "sixteen m", "end"),
        node("Unsqueeze", "begin axis", "begins"),
        node("Unsqueeze", "end axis", "ends"),
        node("Slice", "table begins ends axis", "rows"),
        node("ReduceSum", "rows axis", "sums", keepdims=0),
        node("Unsqueeze", "x minus_one", "x_1"),
        node("Mul", "x_1 sums", "y"),
    ]
    table = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float32)
    numbers = {"one": np.int64(1), "sixteen": np.int64(16)}
    return model(nodes, {"x": ["n", "l"]}, 3, **numbers, axis=np.array([0]), minus_one=np.array([-1]), table=table)


def over_the_number_of_rows() -> bytes:
    """x [n, l] by n, as a floating-point number: rows are not apart."""
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "rows"),
        node("Cast", "rows", "number", to=TensorProto.FLOAT),
        node("Div", "x number", "y"),
    ]
    return model(nodes, {"x": ["n", "l"]}, 2, zero=np.int64(0))


def agree(session: core.Session, made: bytes, feeds: Feeds) -> None:
    (expected,) = ort.InferenceSession(made).run(None, feeds)
    found = session.run(feeds)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def feeds(*shape: int) -> Feeds:
    return {"x": np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize("stride", [1, 2, 3, 8])
def test_padding_computed_in_floating_point(stride: int) -> None:
    made = padded_to_a_stride(stride)
    with core.compile(made, threads=1, tune="off") as session:
        assert session.batching.batchable
        for rows, length in ((1, 5), (2, 6), (1, 7), (3, 19), (2, 40), (1, 101)):
            agree(session, made, feeds(rows, 3, length))
            assert session.settle(60)
        assert "FALLBACK" not in session.explain()


def test_a_clamped_size_cuts_a_table() -> None:
    made = cut_around_the_middle()
    with core.compile(made, threads=1, tune="off") as session:
        assert session.batching.batchable
        for length in (1, 5, 15, 16, 17, 40):
            agree(session, made, feeds(2, length))
            assert session.settle(60)
        assert "FALLBACK" not in session.explain()
        assert "in parts" not in session.explain() and "parts, and references" not in session.explain()


def test_a_number_of_rows_as_a_floating_point_number_keeps_rows_together() -> None:
    made = over_the_number_of_rows()
    with core.compile(made, threads=1, tune="off") as session:
        assert not session.batching.batchable
        for rows in (1, 3, 8):
            agree(session, made, feeds(rows, 4))
