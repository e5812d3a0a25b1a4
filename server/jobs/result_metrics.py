"""Reads metrics.json of a job's result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

_MAX_FILE_BYTES = 64 << 20  # a larger file is not read; a confusion matrix of 1,000 classes needs about 12 MiB
_MAX_RECORD_BYTES = 1 << 18  # most bytes of metrics that a job's record holds
LEFT_OUT = "left_out"  # the field that names the fields that a record leaves out


def read_document(file: Path) -> dict[str, Any] | None:
    """Return the document in a metrics.json, None if it is too large or no object; raises OSError, ValueError.

    NaN and infinities, which Python writes although JSON has none, become None.
    """
    if file.stat().st_size > _MAX_FILE_BYTES:
        return None
    raw = file.read_bytes()
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            document = json.loads(raw, parse_constant=lambda _: None)
        except RecursionError as error:
            raise ValueError("the document is nested too deeply") from error
    return document if isinstance(document, dict) else None


def metrics_for_record(file: Path) -> dict[str, Any]:
    """Return the document in a metrics.json for a job's record; empty if there is no valid one.

    If it exceeds 256 KiB of JSON, its largest fields, but never `metrics`, are left out and named in `left_out`.
    """
    try:
        document = read_document(file)
    except (OSError, ValueError):
        return {}
    return _shorten(document) if document is not None else {}


def _shorten(document: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: len(orjson.dumps(value)) for name, value in document.items()}
    total, left_out = sum(sizes.values()), list[str]()
    for name in sorted(sizes.keys() - {"metrics"}, key=lambda name: -sizes[name]):
        if total <= _MAX_RECORD_BYTES:
            break
        total -= sizes[name]
        left_out.append(name)
    kept = {name: value for name, value in document.items() if name not in left_out}
    return {**kept, LEFT_OUT: left_out} if left_out else kept
