"""One file of named sections, checked before anything in it is used: what compiled models are kept in.

    magic (8 bytes), zeros up to 4096
    sections, each from a multiple of 4096 on
    header: JSON {"facts": ..., "sections": {name: [offset, [[bytes, SHA-256] of every span, one after the other]]}}
    trailer: bytes of the header (64 bits), SHA-256 of the header, magic

A bundle holds native code. It is read only when it belongs to this user or to root, nobody else can write to it, and
its digests hold; those of a file that this process has just written itself are not computed once more. Sections are
mapped, not copied: their pages come from the file and are shared between processes.

Linux keeps a file in pages as large as what was written at a time, and maps them as such: weights are read from memory
a quarter faster from pages of 2 MiB than from 4 KiB (14 instead of 11 GB/s), so files are written and read in those.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from core.errors import ArtifactError
from core.runtime.memory import prefer_huge_pages

MAGIC = b"LATHE\r\n\x1a"
_TRAILER = struct.Struct("<Q32s8s")
_PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)
_HUGE_PAGE = 2 << 20
_LARGEST_HEADER = 64 << 20
LARGE = 64 << 10  # bytes of a chunk that makes a span of its own

Bytes: TypeAlias = NDArray[np.uint8]
Chunks: TypeAlias = Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Written:
    """Tells a file as it was written from every other, and from what becomes of it when somebody writes to it."""

    device: int
    inode: int
    nbytes: int
    modified: int  # nanoseconds
    digest: str = field(default="", compare=False)  # of the header, as `Bundle.digest`

    @classmethod
    def of(cls, descriptor: int) -> Written:
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a section that have a digest of their own."""

    offset: int  # from the start of the section
    nbytes: int
    sha256: str


def write_bundle(path: Path, facts: Mapping[str, Any], sections: Mapping[str, Chunks], durable: bool = True) -> Written:
    """Write a bundle; whoever opens `path` meanwhile sees the old file or the new one. Equal contents give equal bytes.

    `durable`: on disk when this returns, even if the machine stops then; a cache can do without.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with _Writer(os.fdopen(descriptor, "wb", buffering=0)) as file:
            file.write(MAGIC)
            table = {name: _write_section(file, chunks) for name, chunks in sections.items()}
            header = json.dumps({"facts": facts, "sections": table}).encode()
            digest = hashlib.sha256(header)
            file.write(header + _TRAILER.pack(len(header), digest.digest(), MAGIC))
            file.flush()
            if durable:
                os.fsync(descriptor)
            written = replace(Written.of(descriptor), digest=digest.hexdigest())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return written


class _Writer:
    """A file that is written a huge page at a time."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._page = bytearray(_HUGE_PAGE)
        self._filled = 0  # bytes of the page that wait
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
        """Write what waits."""
        rest = memoryview(self._page)[: self._filled]
        while len(rest):
            rest = rest[self._file.write(rest) :]
        self._written, self._filled = self.tell(), 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _write_section(file: _Writer, chunks: Chunks) -> tuple[int, list[tuple[int, str]]]:
    """Offset, and the size and digest of every span: a large chunk, or all small ones between two of those."""
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
    """An open bundle. `facts` are what its writer noted; sections stay valid as long as their arrays are held."""

    def __init__(self, path: Path, written: Written | None = None) -> None:
        """`written` is what `write_bundle` said of a file that this process wrote. As long as that is what lies at
        `path`, untouched, its sections are taken as they are.

        ArtifactError when the file is missing, not a whole bundle, or somebody else could have written it.
        """
        self.name = path.name
        self.digest = ""  # of the header, and with it of all sections
        self._descriptor = _open(path)
        self._is_known = written is not None and Written.of(self._descriptor) == written
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
        """The bytes of a section, mapped read-only, after their digests were checked."""
        spans = self.spans(name)
        data = self._map(int(self._sections[name][0]), sum(span.nbytes for span in spans))
        for span in [] if self._is_known else spans:
            content = data[span.offset : span.offset + span.nbytes]
            if hashlib.sha256(content.data).hexdigest() != span.sha256:
                place = f"bytes {span.offset} to {span.offset + span.nbytes} of its section '{name}'"
                raise ArtifactError(f"{self.name} is damaged: the digest of {place} differs from the header")
        return data

    def spans(self, name: str) -> list[Span]:
        """What a section consists of, from its beginning to its end. ArtifactError when there is none."""
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
        """The bytes of a section, without a look at it. ArtifactError when there is none."""
        return sum(span.nbytes for span in self.spans(name))

    def close(self) -> None:
        """Arrays that were handed out stay valid."""
        os.close(self._descriptor)

    def close_at_end(self) -> None:
        """Close as soon as nobody has this bundle any more, instead of by `close`."""
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
        if magic != MAGIC or size > min(_LARGEST_HEADER, whole - _TRAILER.size):
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
    """Whether only `user`, or root, could have written a file."""
    only_owner_writes = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(status.st_mode) and status.st_uid in (user, 0) and only_owner_writes
