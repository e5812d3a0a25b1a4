"""System shared memory: parts of POSIX shared memory objects that clients registered, so that tensors need not travel.

Nothing is mapped: whoever makes a mapped object shorter ends the process that reads it (SIGBUS). Bytes are copied with
``pread`` and ``pwrite``, which say so instead. Regions are registered on the event loop's thread; they are read and
written on any. An object stays open while somebody reads or writes it, even if its region is unregistered meanwhile:
else its descriptor could be another file's by then.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from server.errors import BadRequest, Conflict, Forbidden, NotFound, TooLarge, Unsupported
from server.types import Span

FOLDER = Path("/dev/shm")
MOST = 256  # regions, each of which holds a file open
LARGEST = (1 << 63) - 1  # of offsets and sizes: a file's
_KEY = re.compile(r"/?([^/\0]{1,255})")  # as shm_open takes it
_REFUSED = "shared memory is not allowed here: LATHE_SHARED_MEMORY=true allows it; tensors may travel in the message"


class OpenObject:
    """An open shared memory object; it is closed when nobody holds it any more."""

    __slots__ = ("file",)

    def __init__(self, key: str) -> None:
        self.file = -1
        self.file = _open(key)

    def close(self) -> None:
        """Close it now; may be called again."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Region:
    """``byte_size`` bytes at ``offset`` of the object that ``key`` names."""

    name: str
    key: str
    offset: int
    byte_size: int
    object: OpenObject

    @property
    def file(self) -> int:
        """The object's descriptor."""
        return self.object.file

    def describe(self) -> dict[str, Any]:
        """Return it as the protocol's status has it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def check_is_whole(self) -> None:
        """Raise BadRequest where the object is shorter than it was when it was registered."""
        found = os.fstat(self.file).st_size
        if found < self.offset + self.byte_size:
            raise BadRequest(
                f"shared memory region {self.name!r}: expected an object of at least {self.offset + self.byte_size} "
                f"bytes, as registered, got {found}"
            )


class Regions:
    """The registered regions by name. ``limit``: bytes that one request may have in them."""

    def __init__(self, allowed: bool = False, limit: int = LARGEST) -> None:
        self.allowed = allowed
        self._limit = limit
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open an object; raises BadRequest for one that there is not or that is too short, Conflict for a name that
        is taken."""
        self.check_allowed()
        if not name:
            raise BadRequest("region: expected a name, got none")
        if name in self._regions:
            raise Conflict(f"shared memory region {name[:80]!r} is registered already: unregister it first")
        if len(self._regions) >= MOST:
            raise Conflict(f"shared memory: expected at most {MOST} regions, all of which are registered")
        _check_number("offset", offset, 0)
        _check_number("byte_size", byte_size, 1)
        region = Region(name, key, offset, byte_size, OpenObject(key))
        try:
            region.check_is_whole()
        except BadRequest:
            region.object.close()
            raise
        self._regions[name] = region

    def unregister(self, name: str = "") -> None:
        """Forget one region, or all of them. As with Triton, one that there is not is none the less gone."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Return what is registered, or one region; raises NotFound."""
        return [self._find(name).describe()] if name else [region.describe() for region in self._regions.values()]

    def check_allowed(self) -> None:
        """Raise Unsupported where the server takes no regions."""
        if not self.allowed:
            raise Unsupported(_REFUSED)

    def check_inputs(self, spans: Sequence[Span]) -> None:
        """Raise TooLarge for a request with more bytes in regions than a message may have."""
        total = sum(span.size for span in spans)
        if total > self._limit:
            raise TooLarge(f"inputs: expected at most {self._limit} bytes in shared memory, got {total}")

    def read(self, span: Span) -> memoryview:
        """Return a copy of the bytes there; raises NotFound, or BadRequest where they are not all in the region."""
        region = self._whole(span)
        at, view = 0, np.empty(span.size, np.uint8).data  # not zeroed, which would keep the interpreter lock
        while at < span.size:
            count = os.preadv(region.file, [view[at:]], region.offset + span.offset + at)
            if not count:  # made shorter since
                region.check_is_whole()
                raise BadRequest(f"shared memory region {region.name!r}: expected {span.size} bytes, got {at}")
            at += count
        return view

    def write_all(self, contents: Sequence[tuple[Span, bytes | memoryview]]) -> None:
        """Put bytes there; raises NotFound, or BadRequest where one has no room for its bytes: none is written then."""
        regions = [self._whole(span) for span, _ in contents]
        for span, content in contents:
            if len(content) > span.size:
                raise BadRequest(
                    f"shared memory region {span.region!r}: expected room for {len(content)} bytes of output, "
                    f"got shared_memory_byte_size {span.size}"
                )
        for region, (span, content) in zip(regions, contents, strict=True):
            self._write(region, span, content)

    def _write(self, region: Region, span: Span, content: bytes | memoryview) -> None:
        at, view = 0, memoryview(content)
        try:
            while at < len(view):
                at += os.pwrite(region.file, view[at:], region.offset + span.offset + at)
        except OSError as error:  # no memory left for it, or sealed
            raise BadRequest(f"shared memory region {region.name!r} cannot be written: {error.strerror}") from None

    def _whole(self, span: Span) -> Region:
        region = self._find(span.region)
        if span.offset + span.size > region.byte_size:
            raise BadRequest(
                f"shared memory region {region.name!r}: expected bytes within its {region.byte_size}, "
                f"got {span.size} at {span.offset}"
            )
        region.check_is_whole()
        return region

    def _find(self, name: str) -> Region:
        found = self._regions.get(name)
        if found is None:
            raise NotFound(f"unknown shared memory region {name[:80]!r}")
        return found


def _check_number(field: str, value: int, least: int) -> None:
    if not least <= value <= LARGEST:
        raise BadRequest(f"{field}: expected a number of bytes from {least} to {LARGEST}, got {value}")


def _open(key: str) -> int:
    """Open an object by its key, which names a file of one folder and leads to no other."""
    found = _KEY.fullmatch(key)
    if found is None or found[1] in (".", ".."):
        raise BadRequest(f"key: expected the name of a shared memory object, such as '/name', got {key[:80]!r}")
    try:
        file = os.open(FOLDER / found[1], os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, IsADirectoryError):
        raise BadRequest(f"key: expected a shared memory object, there is none of key {key[:80]!r}") from None
    except OSError as error:
        raise Forbidden(f"key: shared memory object {key[:80]!r} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise BadRequest(f"key: expected a shared memory object, {key[:80]!r} is something else")
    return file
