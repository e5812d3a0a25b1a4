"""The backend interface itself, as tools other than the suite call it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe.core.onnx_backend as backend
from lathe.core.errors import UnsupportedError

N = helper.make_node
X = np.float32([[1, -2, 3]])


def relu_model(op: str = "Relu") -> onnx.ModelProto:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in ("x", "y")]
    graph = helper.make_graph([N(op, ["x"], ["y"])], "g", value[:1], value[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("feeds", [X, [X], (X,), {"x": X}])
def test_inputs_by_order_or_name(feeds: Any) -> None:
    (y,) = backend.prepare(relu_model()).run(feeds)
    np.testing.assert_array_equal(y, [[1, 0, 3]])
    (again,) = backend.run_model(relu_model(), feeds)
    np.testing.assert_array_equal(again, y)


def test_devices_and_models_it_takes() -> None:
    assert backend.supports_device("CPU") and backend.supports_device("cpu:0") and not backend.supports_device("CUDA")
    assert backend.is_compatible(relu_model())
    assert not backend.is_compatible(relu_model("NoSuchOperator"))


def test_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="device 'CUDA:0' is not supported, expected 'CPU'"):
        backend.prepare(relu_model(), "CUDA:0")


def test_options_of_the_compiler_are_passed_on() -> None:
    rep = backend.prepare(relu_model(), optimize=False, threads=2, precision="float32")
    np.testing.assert_array_equal(rep.run(X)[0], [[1, 0, 3]])
    with pytest.raises(UnsupportedError, match="precision 'ternary'"):
        backend.prepare(relu_model(), precision="ternary")


def test_one_node_on_tensors_of_any_element_type() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    result = backend.run_node(N("Add", ["a", "b"], ["c"]), [x, x])
    assert result.c.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result.c.astype(np.float32), 2 * X)


def test_one_node_on_sequences() -> None:
    result = backend.run_node(N("SequenceInsert", ["s", "t"], ["y"]), [[X, X[:, :1]], X[:, 1:]])
    assert isinstance(result.y, list)
    assert [item.shape for item in result.y] == [(1, 3), (1, 1), (1, 2)]


def test_one_node_of_another_domain_with_an_unused_output() -> None:
    result = backend.run_node(N("Binarizer", ["x"], ["y"], domain="ai.onnx.ml"), [X])
    np.testing.assert_array_equal(result.y, [[1, 0, 1]])
    top = backend.run_node(N("TopK", ["x", "k"], ["", "i"]), [X, np.int64([2])])
    np.testing.assert_array_equal(top.i, [[2, 0]])


def test_an_empty_list_has_no_type() -> None:
    with pytest.raises(ValueError, match="expected at least one tensor"):
        backend.run_node(N("SequenceLength", ["s"], ["n"]), [[]])
