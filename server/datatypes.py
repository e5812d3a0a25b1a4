"""The wire's data types and their NumPy counterparts, and the encoding of BYTES tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from server.errors import BadRequest
from server.types import Array

NUMPY_OF: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(np.object_),
}
WIRE_OF: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_OF.items()}
BINARY_ONLY = frozenset({"FP16", "BF16"})

_LENGTH = struct.Struct("<I")


def wire_name(array: Array) -> str:
    """Return the wire's name of an array's dtype, strings being BYTES; raises BadRequest when it has none."""
    name = WIRE_OF.get(array.dtype)
    if name is None and array.dtype.kind in "SU":
        return "BYTES"
    if name is None:
        raise BadRequest(f"arrays of dtype {array.dtype} have no datatype on the wire; known: {', '.join(NUMPY_OF)}")
    return name


def to_bytes(element: object) -> bytes:
    """Return one element of a BYTES tensor as bytes, text as UTF-8."""
    return element if isinstance(element, bytes) else str(element).encode()


def pack_strings(array: Array) -> bytes:
    """Encode a BYTES tensor: for each element in row-major order its length as uint32, then its bytes."""
    parts: list[bytes] = []
    for element in map(to_bytes, array.ravel().tolist()):
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def unpack_strings(data: memoryview, shape: tuple[int, ...], count: int, field: str) -> Array:
    """Decode a BYTES tensor of ``count`` elements; raises BadRequest when lengths and elements do not match."""
    elements: list[bytes] = []
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        if start > len(data):
            raise BadRequest(f"{field}: element {len(elements)} needs a 4-byte length, {len(data) - at} bytes are left")
        (size,) = _LENGTH.unpack_from(data, at)
        at = start + size
        if at > len(data):
            raise BadRequest(f"{field}: element {len(elements)} says {size} bytes, {len(data) - start} are left")
        if len(elements) == count:
            raise BadRequest(f"{field}: expected {count} elements for shape {list(shape)}, got more")
        elements.append(bytes(data[start:at]))
    if len(elements) != count:
        raise BadRequest(f"{field}: expected {count} elements for shape {list(shape)}, got {len(elements)}")
    return object_array(elements, shape)


def object_array(elements: Iterable[object], shape: tuple[int, ...]) -> Array:
    """Return an object array of this shape without NumPy looking into the elements."""
    flat = list(elements)
    array = np.empty(len(flat), dtype=np.object_)
    array[:] = flat
    return array.reshape(shape)
