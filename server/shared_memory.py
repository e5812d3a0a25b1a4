"""System shared memory: clients register regions of POSIX shared memory objects, to pass tensors without sending them.

The server does not map objects: if a client truncates a mapped object, access to it kills the process (SIGBUS). It
copies bytes with `pread` and `pwrite`, which report a short object instead. Regions are registered on the event loop's
thread, and read and written on any thread. An object stays open while a thread reads or writes it, even if its region
is unregistered meanwhile: otherwise its descriptor number could belong to another file by then.
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

from lathe.server.errors import BadRequest, Conflict, Forbidden, NotFound, TooLarge, Unsupported
from lathe.server.types import Span

FOLDER = Path("/dev/shm")
MAX_REGIONS = 256  # regions; each keeps a file open
MAX_OFFSET = (1 << 63) - 1  # bytes; the largest offset and size (off_t)
_KEY = re.compile(r"/?([^/\0]{1,255})")  # the names that shm_open accepts
_REFUSED = "shared memory is not allowed here: LATHE_SHARED_MEMORY=true allows it; tensors may travel in the message"


class OpenObject:
    """An open shared memory object; it is closed when the last reference to it is dropped."""

    __slots__ = ("file",)

    def __init__(self, key: str) -> None:
        self.file = -1
        self.file = _open(key)

    def close(self) -> None:
        """Close the object; further calls do nothing."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Region:
    """`byte_size` bytes at `offset` of the object that `key` names."""

    name: str
    key: str
    offset: int
    byte_size: int
    object: OpenObject

    @property
    def file(self) -> int:
        """The object's file descriptor."""
        return self.object.file

    def describe(self) -> dict[str, Any]:
        """Return the region as the protocol's status object."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def check_size(self) -> None:
        """Raise BadRequest if the object is too short for the region; a client may have truncated it."""
        found = os.fstat(self.file).st_size
        if found < self.offset + self.byte_size:
            raise BadRequest(
                f"shared memory region {self.name!r}: expected an object of at least {self.offset + self.byte_size} "
                f"bytes, as registered, got {found}"
            )


class Regions:
    """The registered regions by name. `limit`: the most bytes of inputs that one request may have in regions."""

    def __init__(self, allowed: bool = False, limit: int = MAX_OFFSET) -> None:
        self.allowed = allowed
        self._limit = limit
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region of an object.

        `offset` and `byte_size` are in bytes. Raises BadRequest for an empty name, an invalid key or number, and if
        there is no such object or it is too short. Raises Forbidden if the object cannot be opened, Conflict if the
        name is taken or `MAX_REGIONS` regions are registered, Unsupported if the server allows no shared memory.
        """
        self.check_allowed()
        if not name:
            raise BadRequest("region: expected a name, got none")
        if name in self._regions:
            raise Conflict(f"shared memory region {name[:80]!r} is registered already: unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise Conflict(f"shared memory: expected at most {MAX_REGIONS} regions, all of which are registered")
        _check_number("offset", offset, 0)
        _check_number("byte_size", byte_size, 1)
        region = Region(name, key, offset, byte_size, OpenObject(key))
        try:
            region.check_size()
        except BadRequest:
            region.object.close()
            raise
        self._regions[name] = region

    def unregister(self, name: str = "") -> None:
        """Unregister the region `name`, or all if it is empty. As in Triton, an unknown name is no error."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Return the status of all regions, or of one; raises NotFound for an unknown name."""
        return [self._find(name).describe()] if name else [region.describe() for region in self._regions.values()]

    def check_allowed(self) -> None:
        """Raise Unsupported if the server allows no shared memory."""
        if not self.allowed:
            raise Unsupported(_REFUSED)

    def check_inputs(self, spans: Sequence[Span]) -> None:
        """Raise TooLarge if the inputs of a request in regions have more bytes than a message may have."""
        total = sum(span.size for span in spans)
        if total > self._limit:
            raise TooLarge(f"inputs: expected at most {self._limit} bytes in shared memory, got {total}")

    def read(self, span: Span) -> memoryview:
        """Return a copy of the bytes of a span; raises NotFound for an unknown region.

        Raises BadRequest if the region or its object does not hold all of these bytes.
        """
        region = self._whole(span)
        at, view = 0, np.empty(span.size, np.uint8).data  # not zeroed, which would keep the interpreter lock
        while at < span.size:
            count = os.preadv(region.file, [view[at:]], region.offset + span.offset + at)
            if not count:  # the object was truncated meanwhile
                region.check_size()
                raise BadRequest(f"shared memory region {region.name!r}: expected {span.size} bytes, got {at}")
            at += count
        return view

    def write_all(self, contents: Sequence[tuple[Span, bytes | memoryview]]) -> None:
        """Write bytes to spans; raises NotFound for an unknown region.

        Raises BadRequest, and writes nothing, if a span is outside of its region or too small for its bytes. Raises
        BadRequest also if a write fails; earlier contents are written then.
        """
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
        except OSError as error:  # no memory is left, or the object is sealed
            raise BadRequest(f"shared memory region {region.name!r} cannot be written: {error.strerror}") from None

    def _whole(self, span: Span) -> Region:
        region = self._find(span.region)
        if span.offset + span.size > region.byte_size:
            raise BadRequest(
                f"shared memory region {region.name!r}: expected bytes within its {region.byte_size}, "
                f"got {span.size} at {span.offset}"
            )
        region.check_size()
        return region

    def _find(self, name: str) -> Region:
        found = self._regions.get(name)
        if found is None:
            raise NotFound(f"unknown shared memory region {name[:80]!r}")
        return found


def _check_number(field: str, value: int, least: int) -> None:
    if not least <= value <= MAX_OFFSET:
        raise BadRequest(f"{field}: expected a number of bytes from {least} to {MAX_OFFSET}, got {value}")


def _open(key: str) -> int:
    """Open an object by its key, the name of a regular file in /dev/shm; links and other paths are refused."""
    found = _KEY.fullmatch(key)
    if found is None or found[1] in (".", ".."):
        raise BadRequest(f"key: expected the name of a shared memory object, such as '/name', got {key[:80]!r}")
    try:
        file = os.open(FOLDER / found[1], os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, IsADirectoryError):
        raise BadRequest(f"key: expected a shared memory object, there is none with key {key[:80]!r}") from None
    except OSError as error:
        raise Forbidden(f"key: shared memory object {key[:80]!r} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise BadRequest(f"key: expected a shared memory object, {key[:80]!r} is no regular file")
    return file
