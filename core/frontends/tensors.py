"""Reads tensors: from `TensorProto` to arrays. All sizes are checked before memory is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.external import ExternalFiles, is_external
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType

_MAX_EMPTY = 1 << 48  # elements of an empty array with zeros counted as 1: NumPy limits that product as well
MAX_DENSE_BYTES = 1 << 28  # of a sparse tensor, whose size in the file does not limit its dense size

_COMPLEX: dict[DType, np.dtype[Any]] = {DType.COMPLEX64: np.dtype(np.float32), DType.COMPLEX128: np.dtype(np.float64)}
_BIT_PATTERNS = (
    DType.FLOAT16, DType.BFLOAT16,
    DType.FLOAT8E4M3FN, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2, DType.FLOAT8E5M2FNUZ, DType.FLOAT8E8M0,
    DType.FLOAT6E2M3, DType.FLOAT6E3M2,
)  # fmt: skip
_FIELDS = {
    DType.FLOAT32: "float_data",
    DType.COMPLEX64: "float_data",
    DType.FLOAT64: "double_data",
    DType.COMPLEX128: "double_data",
    DType.INT64: "int64_data",
    DType.UINT64: "uint64_data",
    DType.UINT32: "uint64_data",
    DType.STRING: "string_data",
}  # all other element types use int32_data


def tensor_array(tensor: onnx.TensorProto, where: str, files: ExternalFiles | None = None) -> Array:
    """The tensor as a read-only array. Its data may lie in one of `files`, which the array may then be a view of.

    ModelError, with `where`, for negative sizes, and for data that does not fill the shape, is out of range of the
    element type, or cannot be read; UnsupportedError for an unknown element type, a rank above 64, and data in
    segments.
    """
    where = f"{where}, tensor '{tensor.name}'" if tensor.name else where
    if tensor.HasField("segment"):
        raise UnsupportedError("it is stored in segments, expected all data in one tensor", where=where)
    dtype, shape = element_type(tensor.data_type, where), check_shape(tensor.dims, where)
    if is_external(tensor):
        data = _external_bytes(tensor, dtype, math.prod(shape), where, files)
        array = _from_raw(data, dtype, math.prod(shape), where)
    elif tensor.HasField("raw_data"):
        array = _from_raw(tensor.raw_data, dtype, math.prod(shape), where)
    else:
        array = _from_typed(tensor, dtype, math.prod(shape), where)
    array = array.reshape(shape)
    array.setflags(write=False)
    return array


def _external_bytes(
    tensor: onnx.TensorProto, dtype: DType, count: int, where: str, files: ExternalFiles | None
) -> Array:
    """The bytes of a tensor whose data lies in another file. ModelError if they cannot be read or `files` is None."""
    if files is None:
        raise ModelError("has external data, expected its data inside the file", where=where)
    return files.read(tensor, (count * dtype.bits + 7) // 8, where)


def element_type(code: int, where: str) -> DType:
    """The element type of an ONNX code. UnsupportedError, which names the code, if Lathe lacks it."""
    try:
        return DType.from_onnx(code)
    except ValueError:
        known = onnx.TensorProto.DataType.values()
        name = onnx.TensorProto.DataType.Name(code) if code in known else "unknown"
        raise UnsupportedError(f"element type {code} ({name}) is not supported", where=where) from None


def check_shape(dims: Sequence[int], where: str) -> tuple[int, ...]:
    """The shape as a tuple. ModelError for negative sizes, UnsupportedError for a rank above 64.

    ModelError also for an empty tensor whose other sizes are so large that no array can have the shape.
    """
    shape = tuple(dims)
    if min(shape, default=0) < 0:
        raise ModelError(f"shape is {list(shape)}, expected no negative sizes", where=where)
    if 0 in shape and math.prod(size or 1 for size in shape) > _MAX_EMPTY:
        raise ModelError(f"shape is {list(shape)}, which no array can have", where=where)
    if len(shape) > 64:  # NumPy's own limit
        raise UnsupportedError(f"rank is {len(shape)}, expected at most 64", where=where)
    return shape


def sparse_array(sparse: onnx.SparseTensorProto, where: str) -> Array:
    """A sparse tensor as a dense, read-only array. Its indices are linear, [NNZ], or coordinates, [NNZ, rank].

    ModelError for values that are no vector, and for indices of another shape or type, or out of range;
    UnsupportedError for more than 256 MiB.
    """
    values, indices = tensor_array(sparse.values, where), tensor_array(sparse.indices, where)
    shape = check_shape(sparse.dims, where)
    if math.prod(shape) * values.itemsize > MAX_DENSE_BYTES:
        raise UnsupportedError(f"sparse tensor of shape {list(shape)} is too large to store densely", where=where)
    if (
        indices.dtype != np.int64
        or values.ndim != 1
        or indices.shape not in ((values.size,), (values.size, len(shape)))
    ):
        raise ModelError(
            f"sparse indices are {indices.dtype}{list(indices.shape)} for {values.size} values", where=where
        )
    dense = np.zeros(shape, values.dtype)
    limit = np.array(math.prod(shape) if indices.ndim == 1 else shape, np.int64)
    if np.less(indices, 0).any() or np.greater_equal(indices, limit).any():
        raise ModelError(f"sparse indices reach outside shape {list(shape)}", where=where)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    dense.setflags(write=False)
    return dense


def _from_raw(data: bytes | Array, dtype: DType, count: int, where: str) -> Array:
    """The `count` elements in little-endian bytes, as a vector. ModelError for strings and a wrong number of bytes."""
    if dtype is DType.STRING:
        raise ModelError("strings are given as raw bytes, expected string_data", where=where)
    expected = (count * dtype.bits + 7) // 8
    if len(data) != expected:
        raise ModelError(f"has {len(data)} bytes of data, expected {expected} for {count} x {dtype}", where=where)
    if dtype.bits < 8:
        return _unpack(np.frombuffer(data, np.uint8), dtype, count)
    if dtype is DType.BOOL:
        return np.frombuffer(data, np.uint8) != 0
    return np.frombuffer(data, dtype.numpy.newbyteorder("<")).astype(dtype.numpy, copy=False)


def _from_typed(tensor: onnx.TensorProto, dtype: DType, count: int, where: str) -> Array:
    """The `count` elements, as a vector, from the repeated field (such as `float_data`) for the element type.

    ModelError for a wrong number of items, or items out of range.
    """
    field = _FIELDS.get(dtype, "int32_data")
    items = getattr(tensor, field)
    is_packed = dtype.bits in (2, 4)  # elements of 6 bits are packed in raw data only
    expected = (count * dtype.bits + 7) // 8 if is_packed else count * (2 if dtype in _COMPLEX else 1)
    if len(items) != expected:
        raise ModelError(f"has {len(items)} items in {field}, expected {expected} for {count} x {dtype}", where=where)
    if dtype is DType.STRING:
        return _strings(items, where)
    if dtype in _COMPLEX:
        return np.array(items, _COMPLEX[dtype]).view(dtype.numpy)
    if field != "int32_data":
        return (
            _in_range(np.array(items, np.uint64), dtype, where)
            if dtype is DType.UINT32
            else np.array(items, dtype.numpy)
        )
    codes = np.array(items, np.int32)
    if is_packed:
        return _unpack(_in_range(codes, DType.UINT8, where), dtype, count)
    if dtype in _BIT_PATTERNS:
        bits = DType.UINT8 if dtype.itemsize == 1 else DType.UINT16
        return _in_range(codes, bits, where).view(dtype.numpy)
    return codes != 0 if dtype is DType.BOOL else _in_range(codes, dtype, where)


def _in_range(codes: Any, dtype: DType, where: str) -> Any:
    narrow = codes.astype(dtype.numpy)
    if not np.array_equal(narrow, codes):
        raise ModelError(f"has elements outside the range of {dtype}", where=where)
    return narrow


def _unpack(packed: Any, dtype: DType, count: int) -> Array:
    """The first `count` elements, narrower than a byte, of packed bytes; the first one is in the lowest bits."""
    bits = np.unpackbits(packed, bitorder="little")[: count * dtype.bits].reshape(count, dtype.bits)
    codes: Any = np.packbits(bits, axis=1, bitorder="little").reshape(count)
    if dtype.is_float:
        return codes.view(dtype.numpy)
    sign = 1 << (dtype.bits - 1) if dtype.label.startswith("int") else 0
    return ((codes.astype(np.int8) ^ sign) - sign).astype(dtype.numpy)


def _strings(items: Sequence[bytes], where: str) -> Array:
    array = np.empty(len(items), dtype=object)
    try:
        array[:] = [item.decode() for item in items]
    except UnicodeDecodeError as error:
        raise ModelError(f"has a string that is not UTF-8: {error.reason}", where=where) from None
    return array
