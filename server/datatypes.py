"""The wire's data types and their NumPy counterparts, and the encoding of BYTES tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from server.errors import BadRequest
from server.steps import Steps, whole
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

STEP = 1 << 12  # elements of a BYTES tensor that are read or written in one go: about half a millisecond
ELEMENT = 56  # bytes that an element takes in memory besides its text: a reference, and bytes' header, rounded up

_LENGTH = struct.Struct("<I")
_WINDOW = 1 << 16  # bytes that are copied before their elements are cut out


def wire_name(array: Array) -> str:
    """Return the wire's name of an array's dtype, strings being BYTES; raises BadRequest when it has none."""
    name = WIRE_OF.get(array.dtype)
    if name is None and array.dtype.kind in "SU":
        return "BYTES"
    if name is None:
        raise BadRequest(f"arrays of dtype {array.dtype} have no datatype on the wire; known: {', '.join(NUMPY_OF)}")
    return name


class _Prefixes(dict[int, bytes]):
    """Lengths as they travel, each made once if it is one of those that are common."""

    def __missing__(self, length: int) -> bytes:
        return _LENGTH.pack(length)


_PREFIXES = _Prefixes({length: _LENGTH.pack(length) for length in range(1 << 10)})


def to_bytes(element: object) -> bytes:
    """Return one element of a BYTES tensor as bytes, text as UTF-8."""
    return element if isinstance(element, bytes) else str(element).encode()


def elements_of(array: Array, at: int) -> list[bytes]:
    """Return the elements of a BYTES tensor from one place on, :data:`STEP` of them at most, in row-major order."""
    elements: list[Any] = (array.ravel() if array.size <= STEP else array.flat[at : at + STEP]).tolist()
    return elements if set(map(type, elements)) <= {bytes} else [to_bytes(element) for element in elements]


def packing(array: Array) -> Steps[bytes]:
    """Encode a BYTES tensor: for each element in row-major order its length as uint32, then its bytes."""
    if array.size <= STEP:
        return _packed(elements_of(array, 0))
    parts: list[bytes] = []
    for at in range(0, array.size, STEP):
        parts.append(_packed(elements_of(array, at)))
        yield
    return b"".join(parts)


def _packed(elements: list[bytes]) -> bytes:
    pairs = [b""] * (2 * len(elements))
    pairs[0::2] = map(_PREFIXES.__getitem__, map(len, elements))
    pairs[1::2] = elements
    return b"".join(pairs)


def pack_strings(array: Array) -> bytes:
    """Encode a BYTES tensor in one go; as :func:`packing`."""
    return whole(packing(array))


def unpacking(data: memoryview, shape: tuple[int, ...], count: int, field: str) -> Steps[Array]:
    """Decode a BYTES tensor of ``count`` elements; raises BadRequest when lengths and elements do not match."""
    array = np.empty(min(count, len(data) // _LENGTH.size), np.object_)
    made = at = 0
    while at < len(data):
        found, end = _elements(data, at, min(STEP, count - made))
        if not found:
            element, end = _element(data, at, made, field)
            if made == count:
                raise BadRequest(f"{field}: expected {count} elements for shape {list(shape)}, got more")
            found = [element]
        array[made : made + len(found)] = found
        made, at = made + len(found), end
        if at < len(data):
            yield
    if made != count:
        raise BadRequest(f"{field}: expected {count} elements for shape {list(shape)}, got {made}")
    return array.reshape(shape)


def unpack_strings(data: memoryview, shape: tuple[int, ...], count: int, field: str) -> Array:
    """Decode a BYTES tensor in one go; as :func:`unpacking`."""
    return whole(unpacking(data, shape, count, field))


def _elements(data: memoryview, at: int, most: int) -> tuple[list[bytes], int]:
    """Return up to ``most`` elements from ``data[at]`` on, and where they end; none if the first one is a long one, or
    is not whole."""
    window = bytes(data[at : at + _WINDOW])  # slices of bytes are bytes, which saves a copy and a view per element
    found: list[bytes] = []
    end, size, last = 0, _LENGTH.size, len(window) - _LENGTH.size
    for _ in range(most):
        if end > last:
            break
        start = end + size
        after = start + _LENGTH.unpack_from(window, end)[0]
        if after > len(window):
            break
        found.append(window[start:after])
        end = after
    return found, at + end


def _element(data: memoryview, at: int, number: int, field: str) -> tuple[bytes, int]:
    """Return one element and where it ends; raises BadRequest where it is not whole."""
    start = at + _LENGTH.size
    if start > len(data):
        raise BadRequest(f"{field}: element {number} needs a 4-byte length, {len(data) - at} bytes are left")
    (size,) = _LENGTH.unpack_from(data, at)
    if start + size > len(data):
        raise BadRequest(f"{field}: element {number} says {size} bytes, {len(data) - start} are left")
    return bytes(data[start : start + size]), start + size


def object_array(elements: Iterable[object], shape: tuple[int, ...]) -> Array:
    """Return an object array of this shape without NumPy looking into the elements."""
    flat = list(elements)
    array = np.empty(len(flat), dtype=np.object_)
    array[:] = flat
    return array.reshape(shape)
