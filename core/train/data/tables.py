"""Tables: CSV or Parquet, one file or several in a folder or zip, whose names may say the part: `test.csv`."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import IO, TypeAlias

from core.train.data.dataset import Dataset, Joined, joined
from core.train.data.given import Given
from core.train.data.members import Members, decompressed, members_of, part_of

_SUFFIXES = {".csv": "csv", ".csv.gz": "csv", ".tsv": "csv", ".tsv.gz": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class TableFile:
    """One file of a table, which `raw` opens; `given.name` is what errors call it."""

    given: Given
    raw: Callable[[], IO[bytes]]
    alone: bool  # not inside an archive, where seeking is slow

    def stream(self) -> AbstractContextManager[IO[bytes]]:
        """For reading from beginning to end, decompressed."""
        return decompressed(self.raw())

    @contextmanager
    def seekable(self) -> Iterator[IO[bytes]]:
        """For reading here and there."""
        if self.alone:
            with self.raw() as file:
                yield file
        else:
            yield io.BytesIO(self._whole)

    @cached_property
    def _whole(self) -> bytes:
        with self.raw() as file:
            size = file.seek(0, io.SEEK_END)
            self.given.spend(size, "")
            file.seek(0)
            return file.read(size)


Reader: TypeAlias = Callable[[TableFile], Dataset]


def format_of(members: Members) -> str | None:
    """csv or parquet, when all files are named so."""
    found = {_format(name) for name in members.names}
    return found.pop() if len(found) == 1 else None


def open_tables(given: Given, read: Reader) -> Dataset:
    """One dataset of all the files: those of one part one after the other, in the order of their names."""
    if given.path.is_file() and not zipfile.is_zipfile(given.path):
        return read(TableFile(given, lambda: given.path.open("rb"), alone=True))
    parts: dict[str, list[Dataset]] = {}
    members = members_of(given.path)
    for name in members.names:
        if _format(name):
            file = replace(given, name=f"{given.name}/{name}")
            table = TableFile(file, partial(members.open, name), members.path(name) is not None)
            parts.setdefault(_part(name), []).append(read(table))
    if not parts:
        raise given.error("holds no tables, expected files named .csv or .parquet")
    if len(parts) > 1 and "" in parts:
        raise given.error(f"'{parts[''][0].name}' belongs to no part, but other files do: train, validation or test")
    order = sorted(parts, key=("", "train", "validation", "test").index)
    return joined(given.name, {part: _stacked(given, parts[part]) for part in order}, given.digest)


def _stacked(given: Given, shards: Sequence[Dataset]) -> Dataset:
    """Files with the same columns, one after the other."""
    first = shards[0]
    if len(shards) == 1:
        return replace(first, fingerprint=given.digest)
    for other in shards[1:]:
        if not first.alike(other):
            raise given.error(f"'{other.name}' has {other.text()}, but '{first.name}' {first.text()}")
    sources = {name: Joined([shard.sources[name] for shard in shards]) for name in first.sources}
    return replace(first, name=given.name, sources=sources, fingerprint=given.digest, line_of=None)


def _format(name: str) -> str | None:
    return next((format for suffix, format in _SUFFIXES.items() if name.lower().endswith(suffix)), None)


def _part(name: str) -> str:
    """The part that the first telling word of a name stands for, or "" where there is none."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    return next((part for word in words if (part := part_of(word))), "")
