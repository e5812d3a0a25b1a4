"""The progress of a job: the last event that its process wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

_TAIL = 1 << 16  # bytes at the end of the file that are searched


def last_event(file: Path) -> dict[str, Any] | None:
    """Return the last complete event in the file; None without a file, or without an event in its last 64 KiB."""
    try:
        with open(file, "rb") as events:
            events.seek(max(0, os.fstat(events.fileno()).st_size - _TAIL))
            text = events.read(_TAIL)
    except OSError:
        return None
    for line in reversed(text[: text.rfind(b"\n") + 1].splitlines()):
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict):
            return event
    return None
