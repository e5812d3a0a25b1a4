"""Tables: CSV or Parquet, one file, or several in a folder or zip. File names may name the part, as `test.csv`."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import IO, TypeAlias

from lathe.core.train.data.dataset import ConcatSource, Dataset, join_parts
from lathe.core.train.data.location import Location
from lathe.core.train.data.members import Members, members_of, open_decompressed, part_of

_SUFFIXES = {".csv": "csv", ".csv.gz": "csv", ".tsv": "csv", ".tsv.gz": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class TableFile:
    """One file of a table. `raw` opens the file as it is stored, compressed or not."""

    location: Location
    raw: Callable[[], IO[bytes]]
    alone: bool  # not inside an archive, in which seeking is slow

    def stream(self) -> AbstractContextManager[IO[bytes]]:
        """The decompressed file, for sequential reading."""
        return open_decompressed(self.raw())

    @contextmanager
    def seekable(self) -> Iterator[IO[bytes]]:
        """Context manager: the file for random access. A file inside an archive is read into memory first."""
        if self.alone:
            with self.raw() as file:
                yield file
        else:
            yield io.BytesIO(self._content)

    @cached_property
    def _content(self) -> bytes:
        with self.raw() as file:
            size = file.seek(0, io.SEEK_END)
            self.location.spend(size, "")
            file.seek(0)
            return file.read(size)


Reader: TypeAlias = Callable[[TableFile], Dataset]


def format_of(members: Members) -> str | None:
    """`csv` or `parquet` if there are files and all have a suffix of that format, otherwise None."""
    found = {_format(name) for name in members.names}
    return found.pop() if len(found) == 1 else None


def open_tables(location: Location, read: Reader) -> Dataset:
    """One dataset of the tables in a file, folder or archive, each read by `read`.

    Files of the same part are concatenated in the order of their names; files with other suffixes are ignored. If only
    one part occurs, the dataset has no parts. DataError without tables, if columns differ, or if only some files name a
    part.
    """
    if location.path.is_file() and not zipfile.is_zipfile(location.path):
        return read(TableFile(location, lambda: location.path.open("rb"), alone=True))
    parts: dict[str, list[Dataset]] = {}
    members = members_of(location.path)
    for name in members.names:
        if _format(name):
            file = replace(location, name=f"{location.name}/{name}")
            table = TableFile(file, partial(members.open, name), members.path(name) is not None)
            parts.setdefault(_part(name), []).append(read(table))
    if not parts:
        raise location.error("expected files named .csv or .parquet, found none")
    if len(parts) > 1 and "" in parts:
        raise location.error(
            f"'{parts[''][0].name}' has no part in its name (train, validation or test), but other files do"
        )
    order = sorted(parts, key=("", "train", "validation", "test").index)
    return join_parts(location.name, {part: _concatenate(location, parts[part]) for part in order}, location.digest)


def _concatenate(location: Location, shards: Sequence[Dataset]) -> Dataset:
    """The concatenation of files with the same columns. DataError if their columns differ."""
    first = shards[0]
    if len(shards) == 1:
        return replace(first, fingerprint=location.digest)
    for other in shards[1:]:
        if not first.has_same_columns(other):
            raise location.error(f"'{other.name}' has {other.text()}, but '{first.name}' has {first.text()}")
    sources = {name: ConcatSource([shard.sources[name] for shard in shards]) for name in first.sources}
    return replace(first, name=location.name, sources=sources, fingerprint=location.digest, line_of=None)


def _format(name: str) -> str | None:
    return next((format for suffix, format in _SUFFIXES.items() if name.lower().endswith(suffix)), None)


def _part(name: str) -> str:
    """The part named by the first word of a file's path that names one: `train` for `train/a.csv`; "" without one."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    return next((part for word in words if (part := part_of(word))), "")
