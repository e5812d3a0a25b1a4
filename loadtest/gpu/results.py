"""The results file of a run: lines of JSON, each written and synced at once.

    {"kind": "run", ...}      a run begins: when, with which code, on which device
    {"kind": "case", ...}     a case's result: part, name, code, ok, text, figures, seconds, and `ended`: "", or why
                              it ended too early ("timeout after 60 s", "exit status -11")
    {"kind": "cache", ...}    a kernel or findings of the tuner, compressed, named as in
                              core/runtime/device/portable_cache.py

A killed run loses only its current case and a line that was not written completely. The next run continues the file.
"""

from __future__ import annotations

import base64
import json
import lzma
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 15 << 20  # of the file: transfers from a rented GPU machine are often limited to 16 MiB


class Results:
    """A results file, which is read if it exists and appended to."""

    def __init__(self, path: Path) -> None:
        """Read the file if it exists, and truncate an incomplete last line. ValueError if it is no results file."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        self.records = [_record(line, path) for line in whole.splitlines()]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        self._size = len(whole)
        self._carried = {record["name"] for record in self.records if record["kind"] == "cache"}

    def add(self, kind: str, **facts: Any) -> None:
        """Append a record and sync it to disk."""
        record = {"kind": kind, **facts}
        line = json.dumps(record).encode() + b"\n"
        with self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
        self._size += len(line)

    def cases(self, code: str) -> dict[str, Mapping[str, Any]]:
        """The latest record of each case measured by this code version, by the case's key."""
        return {f"{each['part']}/{each['name']}": each for each in self.records
                if each["kind"] == "case" and each["code"] == code}  # fmt: skip

    def add_cache_file(self, name: str, data: bytes) -> bool:
        """Append a cache file, unless it is there. False if it does not fit into MAX_BYTES."""
        if name in self._carried:
            return True
        text = base64.b85encode(lzma.compress(data, preset=3)).decode()
        if self._size + len(text) > MAX_BYTES:
            return False
        self._carried.add(name)
        self.add("cache", name=name, data=text)
        return True

    def carried(self) -> Iterator[tuple[str, bytes]]:
        """The (name, bytes) of the cache files in the results file."""
        for record in self.records:
            if record["kind"] == "cache":
                yield record["name"], lzma.decompress(base64.b85decode(record["data"]))

    def without_cache(self) -> str:
        """The file's text without the cache records."""
        return "".join(f"{json.dumps(record)}\n" for record in self.records if record["kind"] != "cache")


def _record(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("kind") not in ("run", "case", "cache"):
        raise ValueError(f"{path} is no result of loadtest.gpu: a line begins with {line[:40]!r}")
    return record
