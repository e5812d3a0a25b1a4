"""Tensors of every element type and storage."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.tensors import sparse_array, tensor_array
from lathe.core.ir.types import DType

NUMBERS = [dtype for dtype in DType if dtype is not DType.STRING]


def sample(dtype: DType) -> Any:
    values = np.array([[0, 1, 2], [3, 5, 7]])
    if dtype is DType.BOOL:
        return values % 2 == 0
    return (values - 4 if dtype is DType.INT4 else values).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_raw_bytes(dtype: DType) -> None:
    array = tensor_array(numpy_helper.from_array(sample(dtype)), "here")
    assert array.dtype == dtype.numpy
    assert array.shape == (2, 3)
    assert array.tobytes() == sample(dtype).tobytes()
    assert not array.flags.writeable


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_typed_fields(dtype: DType) -> None:
    tensor = helper.make_tensor("t", dtype.onnx_code, (2, 3), sample(dtype).ravel())
    assert not tensor.HasField("raw_data")
    assert tensor_array(tensor, "here").tobytes() == sample(dtype).tobytes()


def test_strings() -> None:
    array = tensor_array(TensorProto(dims=[2], data_type=TensorProto.STRING, string_data=[b"a", "ö".encode()]), "here")
    assert array.tolist() == ["a", "ö"]


def test_an_odd_number_of_nibbles() -> None:
    values = np.array([-8, 7, 1], ml_dtypes.int4)
    np.testing.assert_array_equal(tensor_array(numpy_helper.from_array(values), "here"), values)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    assert tensor_array(TensorProto(data_type=1, dims=shape), "here").shape == shape


def raw(dims: list[int], data: bytes, code: int = TensorProto.FLOAT) -> TensorProto:
    return TensorProto(name="w", dims=dims, data_type=code, raw_data=data)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (raw([2], b"\0" * 7), "has 7 bytes of data, expected 8 for 2 x float32"),
        (raw([2], b"\0" * 9), "has 9 bytes of data, expected 8"),
        (raw([-1], b""), "shape is \\[-1\\], expected no negative sizes"),
        (raw([2**62, 2**62], b"\0" * 4), f"has 4 bytes of data, expected {4 * 2**124}"),
        (raw([1] * 65, b"\0" * 4), "rank is 65, expected at most 64"),
        (raw([1], b"\0", TensorProto.UNDEFINED), "element type 0 \\(UNDEFINED\\) is not supported"),
        (raw([1], b"\0", 99), "element type 99 \\(unknown\\) is not supported"),
        (raw([1], b"x", TensorProto.STRING), "strings are given as raw bytes"),
        (TensorProto(dims=[3], data_type=1, float_data=[1, 2]), "has 2 items in float_data, expected 3"),
        (TensorProto(dims=[1], data_type=TensorProto.INT64, float_data=[1]), "has 0 items in int64_data, expected 1"),
        (TensorProto(dims=[1], data_type=TensorProto.UINT8, int32_data=[256]), "outside the range of uint8"),
        (TensorProto(dims=[1], data_type=TensorProto.UINT32, uint64_data=[2**32]), "outside the range of uint32"),
        (TensorProto(dims=[1], data_type=TensorProto.FLOAT16, int32_data=[-1]), "outside the range of uint16"),
        (TensorProto(dims=[1], data_type=TensorProto.STRING, string_data=[b"\xff"]), "not UTF-8"),
        (TensorProto(dims=[1], data_type=1, segment=TensorProto.Segment(begin=0)), "stored in segments"),
    ],
)
def test_data_that_does_not_fill_the_shape_is_refused(tensor: TensorProto, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        tensor_array(tensor, "here")
    assert caught.value.where.startswith("here")


def sparse(indices: Any, dims: list[int], values: Any = (1.0, 2.0)) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(
        values=numpy_helper.from_array(np.array(values, np.float32)),
        indices=numpy_helper.from_array(np.array(indices, np.int64)),
        dims=dims,
    )


def test_sparse_tensors() -> None:
    expected = [[0, 1, 0], [0, 0, 2]]
    np.testing.assert_array_equal(sparse_array(sparse([1, 5], [2, 3]), "here"), expected)
    np.testing.assert_array_equal(sparse_array(sparse([[0, 1], [1, 2]], [2, 3]), "here"), expected)


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (sparse([1, 6], [2, 3]), "reach outside"),
        (sparse([-1, 1], [2, 3]), "reach outside"),
        (sparse([[0, 1], [2, 0]], [2, 3]), "reach outside"),
        (sparse([1], [2, 3]), "sparse indices are int64\\[1\\] for 2 values"),
    ],
)
def test_refuses_sparse_indices(proto: onnx.SparseTensorProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        sparse_array(proto, "here")


def test_a_sparse_tensor_cannot_unfold_to_any_size() -> None:
    with pytest.raises(UnsupportedError, match="too large to store densely"):
        sparse_array(sparse([0, 1], [10**6, 10**6]), "here")
