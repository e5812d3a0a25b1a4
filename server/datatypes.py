"""The datatypes of the Open Inference Protocol with their NumPy dtypes, and the encoding of BYTES tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from lathe.server.errors import BadRequest
from lathe.server.steps import Steps, run_all
from lathe.server.types import Array

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

ELEMENTS_PER_STEP = 1 << 12  # elements of a BYTES tensor that are encoded or decoded per step: about half a millisecond
ELEMENT_OVERHEAD = (
    56  # bytes of memory of an element besides its text: a reference, and the header of `bytes`, rounded up
)

_LENGTH = struct.Struct("<I")
_WINDOW = 1 << 16  # bytes that are copied at once before they are split into elements


def wire_name(array: Array) -> str:
    """Return the protocol's datatype of an array, BYTES for strings; raises BadRequest if there is none."""
    name = WIRE_OF.get(array.dtype)
    if name is None and array.dtype.kind in "SU":
        return "BYTES"
    if name is None:
        raise BadRequest(f"dtype {array.dtype} has no datatype in the protocol; expected one of {', '.join(NUMPY_OF)}")
    return name


class _Prefixes(dict[int, bytes]):
    """Maps the length of an element to its uint32 prefix on the wire; those of lengths below 1024 are precomputed."""

    def __missing__(self, length: int) -> bytes:
        return _LENGTH.pack(length)


_PREFIXES = _Prefixes({length: _LENGTH.pack(length) for length in range(1 << 10)})


def to_bytes(element: object) -> bytes:
    """Return one element of a BYTES tensor as bytes, text as UTF-8."""
    return element if isinstance(element, bytes) else str(element).encode()


def elements_of(array: Array, at: int) -> list[bytes]:
    """Return at most `ELEMENTS_PER_STEP` elements of a BYTES tensor as bytes, in row-major order from index `at` on.

    `at` must be 0 for a tensor of at most `ELEMENTS_PER_STEP` elements: such a tensor is returned whole.
    """
    elements: list[Any] = (
        array.ravel() if array.size <= ELEMENTS_PER_STEP else array.flat[at : at + ELEMENTS_PER_STEP]
    ).tolist()
    return elements if set(map(type, elements)) <= {bytes} else [to_bytes(element) for element in elements]


def pack_in_steps(array: Array) -> Steps[bytes]:
    """Encode a BYTES tensor in steps: the elements in row-major order, each after its length (little-endian uint32)."""
    if array.size <= ELEMENTS_PER_STEP:
        return _encode(elements_of(array, 0))
    parts: list[bytes] = []
    for at in range(0, array.size, ELEMENTS_PER_STEP):
        parts.append(_encode(elements_of(array, at)))
        yield
    return b"".join(parts)


def _encode(elements: list[bytes]) -> bytes:
    pairs = [b""] * (2 * len(elements))
    pairs[0::2] = map(_PREFIXES.__getitem__, map(len, elements))
    pairs[1::2] = elements
    return b"".join(pairs)


def pack_strings(array: Array) -> bytes:
    """Encode a BYTES tensor without pauses, as `pack_in_steps` does."""
    return run_all(pack_in_steps(array))


def unpack_in_steps(data: memoryview, shape: tuple[int, ...], count: int, field: str) -> Steps[Array]:
    """Decode a BYTES tensor of `count` elements in steps: bytes objects in an object array of this shape.

    Raises BadRequest if the lengths do not fit the data, or if there are not `count` elements.

    `field` names the tensor in error messages.
    """
    array = np.empty(min(count, len(data) // _LENGTH.size), np.object_)
    made = at = 0
    while at < len(data):
        found, end = _elements(data, at, min(ELEMENTS_PER_STEP, count - made))
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
    """Decode a BYTES tensor without pauses, as `unpack_in_steps` does."""
    return run_all(unpack_in_steps(data, shape, count, field))


def _elements(data: memoryview, at: int, most: int) -> tuple[list[bytes], int]:
    """Return up to `most` complete elements from the 64 KiB at `data[at]`, and the position after them.

    The list is empty if `most` is 0, or if the first element is incomplete or longer than these 64 KiB. `_element`
    reads such an element.
    """
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
    """Return the element at `data[at]` and the position after it; raises BadRequest if it is incomplete.

    `number` is its index and `field` the tensor's name, for the message.
    """
    start = at + _LENGTH.size
    if start > len(data):
        raise BadRequest(f"{field}: element {number} needs a 4-byte length, {len(data) - at} bytes are left")
    (size,) = _LENGTH.unpack_from(data, at)
    if start + size > len(data):
        raise BadRequest(f"{field}: element {number} says {size} bytes, {len(data) - start} are left")
    return bytes(data[start : start + size]), start + size


def object_array(elements: Iterable[object], shape: tuple[int, ...]) -> Array:
    """Return an object array of this shape; NumPy does not interpret the elements as nested sequences."""
    flat = list(elements)
    array = np.empty(len(flat), dtype=np.object_)
    array[:] = flat
    return array.reshape(shape)
