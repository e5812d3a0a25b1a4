"""Reads JSON files of a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lathe.core.errors import ModelError
from lathe.core.files import open_plain

_LARGEST = 1 << 28  # bytes; the largest published tokenizers have 40 MB


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. ModelError if the file cannot be read, is larger than 256 MiB, or has no object."""
    return parse_object(read_bytes(path), path.name)


def read_bytes(path: Path) -> bytes:
    """The content of a plain file. ModelError if it cannot be read, or is larger than 256 MiB."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST:
                raise ModelError(f"expected at most {_LARGEST} bytes, got {size}", where=path.name)
            return file.read(size)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=path.name) from None


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The object in JSON text. ModelError, which names `where`, for other text and for a key that occurs twice."""
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"expected JSON: {str(error)[:200]}", where=where) from None
    if not isinstance(found, dict):
        raise ModelError(f"expected a JSON object, got {type(found).__name__}", where=where)
    return found


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"key '{twice}' occurs twice", where=where)
    return found
