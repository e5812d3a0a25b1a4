"""Unpacks a tar archive of a version's files while it arrives.

The accepted subset is the one that `lathe push` writes: regular files with flat names (POSIX ustar; sizes up to 8 GiB
in octal, above in base 256), then zeros. Any other entry is refused at its header.
"""

from __future__ import annotations

from collections.abc import Callable

from lathe.server.errors import BadRequest, TooLarge
from lathe.server.repository import names
from lathe.server.repository.manifest import DEFINING, MANIFEST, is_version_content
from lathe.server.repository.staging import StagedFile

BLOCK = 512
_MAGIC = slice(257, 262)
_FIELDS = {"name": slice(0, 100), "size": slice(124, 136), "checksum": slice(148, 156), "prefix": slice(345, 500)}
_KINDS = (b"0", b"\0")  # type flags of a regular file
_MAX_FILES = 64


def is_archive(start: bytes) -> bool:
    """Whether a body that begins with `start` is a tar archive; needs its first 512 bytes."""
    return len(start) >= BLOCK and start[_MAGIC] == b"ustar"


class TarUnpacker:
    """Unpacks an archive that arrives in chunks of any size, at most 64 files of `max_bytes` each.

    `create` creates the file of a given name in the version.
    """

    def __init__(self, create: Callable[[str], StagedFile], max_bytes: int) -> None:
        self._create = create
        self._max_bytes = max_bytes
        self._header = bytearray()
        self._names: set[str] = set()
        self._file: StagedFile | None = None
        self._data_left = 0  # bytes of the file's data still to come
        self._padding_left = 0  # bytes after it, up to a whole block
        self._ended = False

    def write(self, data: bytes) -> None:
        """Unpack the next chunk; raises BadRequest, TooLarge, or the errors of writing."""
        rest = memoryview(data)
        while rest:
            if self._ended:
                self._check_end(rest)
                return
            rest = rest[self._consume(rest) :]

    def finish(self) -> None:
        """Raise BadRequest if the archive ends within a file, or does not hold exactly one model or pipeline."""
        if self._data_left or self._padding_left or self._header:
            raise BadRequest("archive: it ends within a file")
        if not is_version_content(self._names):
            raise BadRequest(f"archive: it holds {sorted(self._names)}, expected {' or '.join(DEFINING)} among them")

    def _consume(self, rest: memoryview) -> int:
        """Process the first bytes of `rest` (file data, padding or header), and return their number, at least one."""
        if self._data_left:
            assert self._file is not None
            part = rest[: self._data_left]
            self._file.write(part)
            self._data_left -= len(part)
            return len(part)
        if self._padding_left:
            skipped = min(self._padding_left, len(rest))
            self._padding_left -= skipped
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
        if name in self._names or len(self._names) == _MAX_FILES:
            raise BadRequest(
                f"archive: {name!r} comes twice or after {_MAX_FILES} files, expected fewer, all different"
            )
        if size > self._max_bytes:
            raise TooLarge(f"archive: {name!r} has {size} bytes, the most that may be uploaded is {self._max_bytes}")
        self._names.add(name)
        self._file = self._create(name)
        self._data_left, self._padding_left = size, -size % BLOCK

    def _check_end(self, rest: memoryview) -> None:
        if any(rest):
            raise BadRequest("archive: data follow its end")


def _read_header(header: bytes) -> tuple[str, int]:
    """Return the name and size of the file that follows; raises BadRequest."""
    if header[_MAGIC] != b"ustar" or _checksum(header) != _number(header[_FIELDS["checksum"]]):
        raise BadRequest("archive: a header is damaged, expected a POSIX tar archive")
    name = header[_FIELDS["name"]].rstrip(b"\0").decode("ascii", "replace")
    if header[156:157] not in _KINDS or any(header[_FIELDS["prefix"]]):
        raise BadRequest(f"archive: {name[:80]!r} is not a regular file at its top level")
    if names.check_file(name) == MANIFEST:
        raise BadRequest(f"archive: {MANIFEST} is written by the server")
    return name, _number(header[_FIELDS["size"]])


def _checksum(header: bytes) -> int:
    """Return the sum of the header's bytes, with the checksum field counted as blanks (POSIX ustar)."""
    at = _FIELDS["checksum"]
    return sum(header) - sum(header[at]) + 8 * ord(" ")


def _number(field: bytes) -> int:
    """Parse a number in octal, or in base 256 if the first bit is set; raises BadRequest."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b" \0")
    if digits and not all(b"0"[0] <= digit <= b"7"[0] for digit in digits):
        raise BadRequest("archive: a header is damaged, expected a POSIX tar archive")
    return int(digits or b"0", 8)
