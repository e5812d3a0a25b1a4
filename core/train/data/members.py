"""`Members`: one interface to the files of a folder and of a zip archive."""

from __future__ import annotations

import gzip
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

# The exceptions of reading damaged members. RuntimeError: encrypted, or a compression that zipfile does not support.
# UnicodeDecodeError: invalid names.
DAMAGE_ERRORS = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, UnicodeDecodeError)

_CHUNK = 1 << 20
_MAX_MEMBERS = 1 << 22
_PARTS = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test", "t10k": "test",
}  # fmt: skip


class Members(Protocol):
    """Files by name, with `/` between folders. `open` is thread-safe."""

    @property
    def names(self) -> Sequence[str]:
        """The sorted names, without hidden files."""
        ...

    def open(self, name: str) -> IO[bytes]: ...

    def path(self, name: str) -> Path | None:
        """The path of the file on the disk; None inside an archive."""
        ...


@dataclass(frozen=True)
class FolderMembers:
    folder: Path

    @cached_property
    def names(self) -> Sequence[str]:
        files = (file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file())
        return _visible(files)

    def open(self, name: str) -> IO[bytes]:
        return (self.folder / name).open("rb")

    def path(self, name: str) -> Path | None:
        return self.folder / name


@dataclass(frozen=True)
class ZipMembers:
    archive: zipfile.ZipFile

    @cached_property
    def names(self) -> Sequence[str]:
        infos = self.archive.infolist()
        if len(infos) > _MAX_MEMBERS:
            raise zipfile.BadZipFile(f"expected at most {_MAX_MEMBERS} files, got {len(infos)}")
        return _visible(info.filename for info in infos if not info.is_dir())

    def open(self, name: str) -> IO[bytes]:
        return self.archive.open(name)

    def path(self, name: str) -> Path | None:
        return None


def members_of(path: Path) -> Members:
    """The files of the folder or zip archive at `path`. The archive is closed when the object is garbage-collected.

    OSError or BadZipFile if `path` is neither.
    """
    if path.is_dir():
        return FolderMembers(path)
    members = ZipMembers(zipfile.ZipFile(path))
    weakref.finalize(members, members.archive.close)
    return members


def part_of(word: str) -> str | None:
    """The part of a dataset that a word names (`train`, `validation` or `test`); None for other words."""
    return _PARTS.get(word.lower())


@contextmanager
def open_decompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Context manager: the file from its start, decompressed if it begins with gzip's magic bytes.

    The file is closed at the end.
    """
    with file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not compressed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as inner:
            yield cast(IO[bytes], inner)


def read_into(file: IO[bytes], flat: NDArray[np.uint8]) -> None:
    """Read the next bytes of the file into all of `flat`, 1 MiB at a time. EOFError if the file has fewer."""
    for start in range(0, len(flat), _CHUNK):
        chunk = file.read(min(_CHUNK, len(flat) - start))
        if len(chunk) != min(_CHUNK, len(flat) - start):
            raise EOFError(f"expected {len(flat)} bytes of data, got {start + len(chunk)}")
        flat[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)


def _visible(names: Iterable[str]) -> Sequence[str]:
    """The sorted names without hidden files and macOS metadata (`__MACOSX`)."""
    return sorted(name for name in names if not any(part.startswith((".", "__MACOSX")) for part in name.split("/")))
