"""`Members`: the files of a folder or of a zip archive, alike."""

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

# What reading members may raise: RuntimeError where one is encrypted, or packed in a way that zipfile does not know;
# UnicodeDecodeError for their names.
DAMAGE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, UnicodeDecodeError)

_CHUNK = 1 << 20
_MOST_MEMBERS = 1 << 22
_PARTS = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test", "t10k": "test",
}  # fmt: skip


class Members(Protocol):
    """Files by name, `/` between folders. `open` may be called from several threads at once."""

    @property
    def names(self) -> Sequence[str]:
        """The names in order, hidden files left out."""
        ...

    def open(self, name: str) -> IO[bytes]: ...

    def path(self, name: str) -> Path | None:
        """Where the file lies on its own, if it does."""
        ...


@dataclass(frozen=True)
class FolderMembers:
    folder: Path

    @cached_property
    def names(self) -> Sequence[str]:
        files = (file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file())
        return _shown(files)

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
        if len(infos) > _MOST_MEMBERS:
            raise zipfile.BadZipFile(f"{len(infos)} files, at most {_MOST_MEMBERS}")
        return _shown(info.filename for info in infos if not info.is_dir())

    def open(self, name: str) -> IO[bytes]:
        return self.archive.open(name)

    def path(self, name: str) -> Path | None:
        return None


def members_of(path: Path) -> Members:
    """The files of a folder, or of the archive at `path`, which is closed when nobody can read from it any more."""
    if path.is_dir():
        return FolderMembers(path)
    members = ZipMembers(zipfile.ZipFile(path))
    weakref.finalize(members, members.archive.close)
    return members


def part_of(word: str) -> str | None:
    """The part of a dataset that a word in a name stands for: train, validation or test."""
    return _PARTS.get(word.lower())


@contextmanager
def decompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The file from its beginning, through gzip where its first bytes say so; closed in the end."""
    with file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not compressed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as inner:
            yield cast(IO[bytes], inner)


def fill(file: IO[bytes], flat: NDArray[np.uint8]) -> None:
    """Read as many bytes as `flat` has, and no more at a time than a piece. EOFError when they end early."""
    for start in range(0, len(flat), _CHUNK):
        chunk = file.read(min(_CHUNK, len(flat) - start))
        if len(chunk) != min(_CHUNK, len(flat) - start):
            raise EOFError(f"{start + len(chunk)} bytes of data, expected {len(flat)}")
        flat[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)


def _shown(names: Iterable[str]) -> Sequence[str]:
    """In order, without what operating systems leave behind."""
    return sorted(name for name in names if not any(part.startswith((".", "__MACOSX")) for part in name.split("/")))
