"""Reads safetensors files: https://github.com/huggingface/safetensors, section "Format".

A file is the length of its header (uint64, little-endian), the header in JSON, and the bytes of the tensors. The header
maps each name to the type, the shape, and the range of bytes of the tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.language.json_file import parse_object, read_json
from lathe.core.language.mapped_file import check_ranges, mapped_bytes
from lathe.core.language.stored_tensor import StoredTensor, element_count

_LONGEST_HEADER = 100_000_000  # bytes; the limit of the format's own reader
_TYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; the file stays mapped into memory.

    ModelError for a damaged file: a header that is no JSON or too long, ranges of bytes that do not fit shape and type,
    leave the file or overlap. UnsupportedError for a type that NumPy lacks.
    """
    data, where = mapped_bytes(path), path.name
    if len(data) < 8:
        raise ModelError(f"expected at least 8 bytes, got {len(data)}", where=where)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_LONGEST_HEADER, len(data) - 8):
        raise ModelError(f"its header has {length} bytes, expected at most {len(data) - 8}", where=where)
    header = parse_object(data[8 : 8 + length].tobytes(), where)
    header.pop("__metadata__", None)
    body = data[8 + length :]
    entries = {name: _entry(name, entry, where) for name, entry in header.items()}
    check_ranges(((start, end, name) for name, (_, _, start, end) in entries.items()), len(body), where)
    return {
        name: StoredTensor(name, kind, shape, body[start:end], _decode)
        for name, (kind, shape, start, end) in entries.items()
    }


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder that has `model.safetensors`, or `model.safetensors.index.json` with several files.

    ModelError if both are missing, if the index names a file outside the folder, or a tensor that its file lacks.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(folder / "model.safetensors")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError("weight_map: expected an object of file names", where=index.name)
    outside = next((name for name in places.values() if Path(name).name != name), None)
    if outside is not None:
        raise ModelError(f"weight_map: expected names of files in this folder, got {outside!r}", where=index.name)
    files = {name: read_safetensors(folder / name) for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        if tensor not in files[name]:
            raise ModelError(f"weight_map: '{name}' has no tensor '{tensor}'", where=index.name)
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def _entry(name: str, entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, start and end of a tensor. ModelError for a malformed entry, UnsupportedError for another type."""
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, ends = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or not _are_sizes(shape) or not _are_sizes(ends) or len(ends) != 2:
        message = f"tensor '{name}': expected dtype, shape and data_offsets, got {json.dumps(entry)[:200]}"
        raise ModelError(message, where=where)
    if kind not in _TYPES:
        raise UnsupportedError(f"tensor '{name}' has type {kind}, expected one of {', '.join(_TYPES)}", where=where)
    size = element_count(shape, name, where) * np.dtype(_TYPES[kind]).itemsize
    if ends[1] - ends[0] != size:
        message = f"tensor '{name}': {kind}{shape} needs {size} bytes, but its range has {ends[1] - ends[0]}"
        raise ModelError(message, where=where)
    return kind, tuple(shape), ends[0], ends[1]


def _are_sizes(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def _decode(tensor: StoredTensor) -> Array:
    return np.frombuffer(tensor.data, _TYPES[tensor.kind]).reshape(tensor.shape)
