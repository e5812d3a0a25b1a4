"""Declared dimensions of models: names that identify a size, and placeholder names such as "?"."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.errors import FeedError
from lathe.core.ir.types import TensorType
from tests.onnx_runtime import plain_session


def model(*dims: str) -> onnx.ModelProto:
    """The model y = x + x, whose input has dimensions of these names."""
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(dims))
    for dim, name in zip(info.type.tensor_type.shape.dim, dims, strict=True):
        dim.dim_param = name  # also an empty name
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [info], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("name", ["?", "", "-1", "*", "None"])
def test_each_placeholder_dimension_is_a_size_of_its_own(name: str) -> None:
    """Paddle's exporter writes "?" for the height and the width of one image."""
    data = model("rows", name, name).SerializeToString()
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    (expected,) = plain_session(data).run(None, {"x": x})
    with lathe.compile(data, threads=1, tune="off") as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], expected)
    type_ = lathe.load(data).inputs[0].type
    assert isinstance(type_, TensorType)
    assert len(type_.symbols) == 3


def test_a_name_means_one_size() -> None:
    data = model("rows", "side", "side").SerializeToString()
    with (
        lathe.compile(data, threads=1, tune="off") as session,
        pytest.raises(FeedError, match="dimension side: expected 3"),
    ):
        session.run({"x": np.zeros((1, 3, 4), np.float32)})
