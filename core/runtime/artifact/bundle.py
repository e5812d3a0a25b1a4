"""A file of named sections, which is checked before any of it is used; the format of compiled models.

    magic (8 bytes), zeros up to 4096
    sections, each at a multiple of 4096
    header: JSON {"facts": ..., "sections": {name: [offset, [[bytes, SHA-256] of every span, one after the other]]}}
    trailer: bytes of the header (64 bits), SHA-256 of the header, magic

A bundle holds native code. It is read only if it belongs to this user or to root, no other user can write to it, and
its digests are right; the digests of a file that this process has just written are not computed again. Sections are
mapped, not copied: their pages come from the file and are shared between processes.

Linux caches a file in pages as large as each write, and maps them as such. Reading weights from memory is a quarter
faster with pages of 2 MiB than with 4 KiB (14 instead of 11 GB/s), so files are written and read in units of 2 MiB.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ArtifactError
from lathe.core.files import replacing
from lathe.core.runtime.host.memory import prefer_huge_pages

MAGIC = b"LATHE\r\n\x1a"
_TRAILER = struct.Struct("<Q32s8s")
_PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)
_HUGE_PAGE = 2 << 20
_MAX_HEADER = 64 << 20
LARGE = 64 << 10  # the least bytes of a chunk that is a span of its own

Bytes: TypeAlias = NDArray[np.uint8]
Chunks: TypeAlias = Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of a file as it was written: differs for every other file, and after any later write."""

    device: int
    inode: int
    nbytes: int
    modified: int  # nanoseconds
    digest: str = field(default="", compare=False)  # of the header, as `Bundle.digest`

    @classmethod
    def of(cls, descriptor: int) -> FileIdentity:
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a section that have a digest of their own."""

    offset: int  # from the start of the section
    nbytes: int
    sha256: str


def write_bundle(
    path: Path, facts: Mapping[str, Any], sections: Mapping[str, Chunks], durable: bool = True
) -> FileIdentity:
    """Write a bundle atomically, and return the identity of the file. Equal contents give equal bytes.

    `facts` are stored as JSON in the header. `durable`: the file is on disk when this returns, even if the machine
    stops then; a cache does not need that. OSError if the file cannot be written.
    """
    with replacing(path, durable) as target:
        file = _Writer(target)
        file.write(MAGIC)
        table = {name: _write_section(file, chunks) for name, chunks in sections.items()}
        header = json.dumps({"facts": facts, "sections": table}).encode()
        digest = hashlib.sha256(header)
        file.write(header + _TRAILER.pack(len(header), digest.digest(), MAGIC))
        file.flush()
        return replace(FileIdentity.of(target.fileno()), digest=digest.hexdigest())


class _Writer:
    """A buffered file that is written in units of one huge page (2 MiB)."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._page = bytearray(_HUGE_PAGE)
        self._filled = 0  # bytes of the page that are not written yet
        self._written = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: _HUGE_PAGE - self._filled]
            self._page[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == _HUGE_PAGE:
                self.flush()

    def tell(self) -> int:
        return self._written + self._filled

    def flush(self) -> None:
        """Write the buffered bytes."""
        self._file.write(memoryview(self._page)[: self._filled])
        self._file.flush()
        self._written, self._filled = self.tell(), 0


def _write_section(file: _Writer, chunks: Chunks) -> tuple[int, list[tuple[int, str]]]:
    """Write a section at the next page; returns its offset, and the size and SHA-256 of each span.

    A span is one chunk of at least `LARGE` bytes, or all smaller chunks between two of these.
    """
    start = -(-file.tell() // _PAGE) * _PAGE
    file.write(bytes(start - file.tell()))
    spans: list[tuple[int, str]] = []
    for is_large, group in groupby(chunks, lambda chunk: len(chunk) >= LARGE):
        for together in ([chunk] for chunk in group) if is_large else [group]:
            begun, digest = file.tell(), hashlib.sha256()
            for chunk in together:
                digest.update(chunk)
                file.write(chunk)
            if file.tell() > begun:
                spans.append((file.tell() - begun, digest.hexdigest()))
    return start, spans


class Bundle:
    """An open bundle, which its owner closes once. `facts` are those given to `write_bundle`, as JSON keeps them."""

    def __init__(self, path: Path, written: FileIdentity | None = None) -> None:
        """Open a bundle and check its header.

        `written`: the result of `write_bundle` in this process. If the file at `path` is still that one, unchanged, the
        digests of its sections are not checked.

        ArtifactError if the file is missing, a link, not a complete bundle, or could have been written by a user other
        than this one and root.
        """
        self.name = path.name
        self.digest = ""  # of the header, and with it of all sections
        self._descriptor = _open(path)
        self._is_known = written is not None and FileIdentity.of(self._descriptor) == written
        try:
            header = self._header()
            self.facts: dict[str, Any] = dict(header["facts"])
            self._sections: dict[str, list[Any]] = dict(header["sections"])
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise ArtifactError(f"{self.name}: its header is malformed ({type(error).__name__})") from error
        except BaseException:
            self.close()
            raise

    def section(self, name: str) -> Bytes:
        """The bytes of a section, mapped read-only, after their digests were checked.

        The array stays valid after `close`. The digests of a file that this process has written (`written`) are not
        checked. ArtifactError if there is no such section, if it lies outside the file, or if a digest differs.
        """
        spans = self.spans(name)
        data = self._map(int(self._sections[name][0]), sum(span.nbytes for span in spans))
        for span in [] if self._is_known else spans:
            content = data[span.offset : span.offset + span.nbytes]
            if hashlib.sha256(content.data).hexdigest() != span.sha256:
                place = f"bytes {span.offset} to {span.offset + span.nbytes} of its section '{name}'"
                raise ArtifactError(f"{self.name} is damaged: the digest of {place} differs from the header")
        return data

    def spans(self, name: str) -> list[Span]:
        """The spans of a section in order. ArtifactError if there is no such section."""
        spans: list[Span] = []
        try:
            at = 0
            for size, digest in self._sections[name][1]:
                spans.append(Span(at, int(size), str(digest)))
                at += int(size)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ArtifactError(f"{self.name} has no section '{name}'") from error
        return spans

    def size(self, name: str) -> int:
        """The number of bytes of a section, without reading it. ArtifactError if there is no such section."""
        return sum(span.nbytes for span in self.spans(name))

    def close(self) -> None:
        """Close the file; arrays of sections stay valid. Call it once, and not after `close_at_end`."""
        os.close(self._descriptor)

    def close_at_end(self) -> None:
        """Close the file when this object is garbage-collected, instead of by `close`."""
        finalize(self, os.close, self._descriptor)

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _map(self, offset: int, size: int) -> Bytes:
        whole = os.fstat(self._descriptor).st_size
        if offset % _PAGE or offset < 0 or size < 0 or offset + size > whole:
            raise ArtifactError(f"{self.name}: a section lies at {offset}+{size}, the file has {whole} bytes")
        if size == 0:
            return np.zeros(0, np.uint8)
        mapping = mmap.mmap(self._descriptor, size, offset=offset, access=mmap.ACCESS_READ)
        prefer_huge_pages(mapping)
        return np.frombuffer(mapping, np.uint8)

    def _header(self) -> dict[str, Any]:
        whole = os.fstat(self._descriptor).st_size
        trailer = os.pread(self._descriptor, _TRAILER.size, max(whole - _TRAILER.size, 0))
        if len(trailer) < _TRAILER.size or os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            raise ArtifactError(f"{self.name} is not a compiled model")
        size, digest, magic = _TRAILER.unpack(trailer)
        if magic != MAGIC or size > min(_MAX_HEADER, whole - _TRAILER.size):
            raise ArtifactError(f"{self.name} is not a whole compiled model: its end is missing or damaged")
        header = os.pread(self._descriptor, size, whole - _TRAILER.size - size)
        if hashlib.sha256(header).digest() != digest:
            raise ArtifactError(f"{self.name} is damaged: the digest of its header differs")
        self.digest = digest.hex()
        read = json.loads(header)
        if not isinstance(read, dict):
            raise ValueError("the header is not an object")
        return read


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path.name} is missing") from error
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be opened, or is a link: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not is_trusted(status, os.geteuid()):
        os.close(descriptor)
        raise ArtifactError(f"{path.name} is no file, belongs to another user, or can be written by others")
    return descriptor


def is_trusted(status: os.stat_result, user: int) -> bool:
    """Whether `status` is that of a regular file of `user` or root that neither its group nor others may write."""
    only_owner_writes = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(status.st_mode) and status.st_uid in (user, 0) and only_owner_writes
