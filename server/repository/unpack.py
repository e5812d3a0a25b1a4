"""Takes a tar archive apart while it arrives: the files of a version, and nothing else.

Only what `lathe push` writes is understood: plain files with flat names (POSIX ustar, sizes up to 8 GiB in octal, above
in base 256), one after the other, and zeros at the end. Anything else is refused at its header.
"""

from __future__ import annotations

from collections.abc import Callable

from server.errors import BadRequest, TooLarge
from server.repository import names
from server.repository.manifest import DEFINING, MANIFEST, defines
from server.repository.staging import StagedFile

BLOCK = 512
_MAGIC = slice(257, 262)
_FIELDS = {"name": slice(0, 100), "size": slice(124, 136), "checksum": slice(148, 156), "prefix": slice(345, 500)}
_KINDS = (b"0", b"\0")  # a plain file
_MOST_FILES = 64


def is_archive(start: bytes) -> bool:
    """Say whether a body that begins so is a tar archive."""
    return len(start) >= BLOCK and start[_MAGIC] == b"ustar"


class Unpacker:
    """Receives the archive in pieces of any size; ``create`` begins a file of the version."""

    def __init__(self, create: Callable[[str], StagedFile], max_bytes: int) -> None:
        self._create = create
        self._max_bytes = max_bytes
        self._header = bytearray()
        self._names: set[str] = set()
        self._file: StagedFile | None = None
        self._left = 0  # bytes of the file's data still to come
        self._padding = 0  # bytes after it, up to a whole block
        self._ended = False

    def write(self, data: bytes) -> None:
        """Take the next piece; raises BadRequest, TooLarge, or what writing raises."""
        rest = memoryview(data)
        while rest:
            if self._ended:
                self._check_end(rest)
                return
            rest = rest[self._take(rest) :]

    def finish(self) -> None:
        """Raises BadRequest where the archive is cut short or holds no model or pipeline."""
        if self._left or self._padding or self._header:
            raise BadRequest("archive: it ends in the middle of a file")
        if not defines(self._names):
            raise BadRequest(f"archive: it holds {sorted(self._names)}, expected {' or '.join(DEFINING)} among them")

    def _take(self, rest: memoryview) -> int:
        """Use up some of what has come, and return how many bytes."""
        if self._left:
            assert self._file is not None
            part = rest[: self._left]
            self._file.write(part)
            self._left -= len(part)
            return len(part)
        if self._padding:
            skipped = min(self._padding, len(rest))
            self._padding -= skipped
            return skipped
        part = rest[: BLOCK - len(self._header)]
        self._header += part
        if len(self._header) == BLOCK:
            self._begin(bytes(self._header))
            self._header.clear()
        return len(part)

    def _begin(self, header: bytes) -> None:
        if not any(header):
            self._ended = True
            return
        name, size = _read_header(header)
        if name in self._names or len(self._names) == _MOST_FILES:
            raise BadRequest(
                f"archive: {name!r} comes twice or after {_MOST_FILES} files, expected fewer, all different"
            )
        if size > self._max_bytes:
            raise TooLarge(f"archive: {name!r} has {size} bytes, the most that may be uploaded is {self._max_bytes}")
        self._names.add(name)
        self._file = self._create(name)
        self._left, self._padding = size, -size % BLOCK

    def _check_end(self, rest: memoryview) -> None:
        if any(rest):
            raise BadRequest("archive: there is more behind its end")


def _read_header(header: bytes) -> tuple[str, int]:
    """Name and size of the file that follows; raises BadRequest."""
    if header[_MAGIC] != b"ustar" or _checksum(header) != _number(header[_FIELDS["checksum"]]):
        raise BadRequest("archive: a header is damaged, expected a POSIX tar archive")
    name = header[_FIELDS["name"]].rstrip(b"\0").decode("ascii", "replace")
    if header[156:157] not in _KINDS or any(header[_FIELDS["prefix"]]):
        raise BadRequest(f"archive: {name[:80]!r} is no plain file at its top")
    if names.check_file(name) == MANIFEST:
        raise BadRequest(f"archive: {MANIFEST} is written by the server")
    return name, _number(header[_FIELDS["size"]])


def _checksum(header: bytes) -> int:
    """The sum of the header's bytes, its checksum counted as spaces."""
    at = _FIELDS["checksum"]
    return sum(header) - sum(header[at]) + 8 * ord(" ")


def _number(field: bytes) -> int:
    """A number in octal, or in base 256 where the first bit is set; raises BadRequest."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b" \0")
    if digits and not all(b"0"[0] <= digit <= b"7"[0] for digit in digits):
        raise BadRequest("archive: a header is damaged, expected a POSIX tar archive")
    return int(digits or b"0", 8)
