"""DLPack: arrays in a device's memory, shared with other libraries in one process.

Of the two protocols that libraries know, this one also has bfloat16, and JAX and TensorFlow support it. The structures
are those of DLPack 0.8, without versions (https://dmlc.github.io/dlpack/latest/c_api.html); the methods follow the
Python array API standard (https://data-apis.org/array-api/latest/design_topics/data_interchange.html).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from lathe.core.ir.types import DType

_NAME = b"dltensor"


class DeviceType(IntEnum):
    """The kinds of memory that Lathe reads or writes, as DLPack numbers them."""

    CPU = 1
    CUDA = 2
    CUDA_MANAGED = 13


class _Code(IntEnum):
    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4
    BOOL = 6


_CODES = {"i": _Code.INT, "u": _Code.UINT, "f": _Code.FLOAT, "b": _Code.BOOL}
_KINDS = {code: kind for kind, code in _CODES.items()}


class _Tensor(ctypes.Structure):
    """DLTensor: `data` is an address; `shape` and `strides` (null: row-major) count elements."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    """DLManagedTensor: the consumer calls `deleter` once with the structure's address."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # of a capsule; the argument is the capsule's own address
_exported: dict[int, tuple[Any, ...]] = {}  # what the structures that others hold refer to, by their addresses

_api = ctypes.pythonapi
_new = _api.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_pointer = _api.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
# In a destructor the capsule has no references left, so it may not become a Python object.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _drop(capsule: int) -> None:
    """Forget the structure of a capsule that nobody consumed; a consumer renames the capsule."""
    if _is_valid(capsule, _NAME):
        _forget(_pointer_at(capsule, _NAME))


_deleter, _destructor = _Deleter(_forget), _Destructor(_drop)  # of every structure, and of every capsule


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous array that another library exports; `owner` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any


def export(address: int, shape: Sequence[int], dtype: np.dtype[Any], device: tuple[DeviceType, int]) -> Any:
    """A capsule with a contiguous array; `device`: kind and number. TypeError for types that DLPack lacks."""
    code, bits = _type_of(dtype)
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed = _Managed()
    fields = managed.tensor
    fields.data, fields.ndim, fields.shape = address, len(shape), ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    fields.device_type, fields.device_id = device
    fields.code, fields.bits, fields.lanes = code, bits, 1
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    place = ctypes.addressof(managed)
    _exported[place] = managed, sizes
    return _new(place, _NAME, _destructor)


def read(capsule: Any) -> Block:
    """The array in a capsule, which stays as it is and frees the array when `Block.owner` is dropped.

    ValueError for an array that is not contiguous and row-major; TypeError for a type that Lathe lacks.
    """
    tensor = _Managed.from_address(_pointer(capsule, _NAME)).tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_dense(shape, tensor.strides[: tensor.ndim]):
        raise ValueError("expected a contiguous array, got one with strides")
    return Block((tensor.data or 0) + tensor.byte_offset, shape, _dtype_of(tensor), capsule)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides in elements are those of a row-major array; those of axes of extent 1 do not matter."""
    step, dense = 1, True
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        dense &= extent == 1 or stride == step
        step *= extent
    return dense or 0 in shape


def _type_of(dtype: np.dtype[Any]) -> tuple[_Code, int]:
    if dtype == DType.BFLOAT16.numpy:
        return _Code.BFLOAT, 16
    if dtype.kind not in _CODES or not dtype.isbuiltin:
        raise TypeError(f"DLPack has no element type {dtype}")
    return _CODES[dtype.kind], 8 * dtype.itemsize


def _dtype_of(tensor: _Tensor) -> np.dtype[Any]:
    if tensor.lanes == 1 and (tensor.code, tensor.bits) == (_Code.BFLOAT, 16):
        return np.dtype(DType.BFLOAT16.numpy)
    if tensor.lanes != 1 or tensor.code not in _KINDS or tensor.bits % 8:
        raise TypeError(f"expected an element type of NumPy or bfloat16, got code {tensor.code} of {tensor.bits} bits")
    return np.dtype(f"{_KINDS[tensor.code]}{tensor.bits // 8}")
