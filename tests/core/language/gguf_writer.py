"""Writes GGUF files for tests, by the specification; NumPy alone, so that scripts of other environments import it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_SCALARS = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}
ALIGNMENT = 32


def gguf_bytes(metadata: Mapping[str, tuple[str, Any]], tensors: Mapping[str, tuple[int, Any, bytes]]) -> bytes:
    """A GGUF file of version 3.

    Metadata: (type, value), where a type is "str", "strs", "i32s", "f32s" or one of `_SCALARS`.
    Tensors: (number of the type, shape, bytes)."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, (kind, value) in metadata.items():
        out += _text(key) + _value(kind, value)
    offset = 0
    for name, (number, shape, data) in tensors.items():
        out += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", number, offset)
        offset += len(data) + -len(data) % ALIGNMENT
    for _, _, data in tensors.values():
        out += bytes(-len(out) % ALIGNMENT) + data
    return bytes(out) + bytes(-len(out) % ALIGNMENT)


def floats(array: Any) -> tuple[int, Any, bytes]:
    """A tensor of float32 for `gguf_bytes`."""
    return 0, array.shape, np.ascontiguousarray(array, "<f4").tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(kind: str, value: Any) -> bytes:
    match kind:
        case "str":
            return struct.pack("<I", 8) + _text(value)
        case "strs":
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case "f32s":
            return struct.pack("<IIQ", 9, 6, len(value)) + np.array(value, "<f4").tobytes()
        case "i32s":
            return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()
    number, form = _SCALARS[kind]
    return struct.pack("<I", number) + struct.pack(form, value)
