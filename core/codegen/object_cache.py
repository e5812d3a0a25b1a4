"""A cache of object files on disk. They are native code: a file must be this user's own, and its digest must match."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from contextlib import suppress
from pathlib import Path

from lathe.core.errors import ArtifactError
from lathe.core.files import replace_file

_DIGEST_BYTES = 32
_LOOKS = 16  # scans of the folder, on average, while all processes together write `max_bytes`


class ObjectCache:
    """A folder of `<key>.o` files, each the SHA-256 of the object followed by the object.

    Several processes may share it: files appear by rename. A file counts as absent if it is damaged,
    a symbolic link, of another user, or writable by others.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        """Create the folder with access for this user only, unless it exists. Errors as for `make_private_folder`.

        `max_bytes` limits the size of the cache: beyond it the least recently used objects are deleted (see `Quota`).
        """
        self.folder = folder
        self._quota = Quota(folder, "*.o", max_bytes) if max_bytes is not None else None
        make_private_folder(folder)

    def get(self, key: str) -> bytes | None:
        """The object of this key, or None if there is no file that can be trusted.

        Sets the file's modification time, unless the file system is read-only.
        """
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not _is_private(os.fstat(descriptor), stat.S_ISREG):
                return None
            content = file.read()
            digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(data).digest() != digest:
                return None
            with suppress(OSError):
                os.utime(descriptor)  # the time of last use, for eviction
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store an object. The write is atomic: concurrent readers see the whole object, the one before, or none.

        OSError if the file cannot be written. May delete other objects, see `Quota`.
        """
        replace_file(self._path(key), hashlib.sha256(data).digest() + data, mode=0o600)
        if self._quota is not None:
            self._quota.added(_DIGEST_BYTES + len(data))

    def put_if_possible(self, key: str, data: bytes) -> None:
        """As `put`; nothing happens if the file cannot be written, which only costs another compilation."""
        with suppress(OSError):  # a full disk, a read-only folder
            self.put(key, data)

    def names(self) -> list[str]:
        """The keys of all stored objects, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.o"))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.o"


class Quota:
    """Limits the size of a folder: deletes the least recently used files (by modification time).

    Scanning many files takes long: a second for 100,000 objects. So a scan follows a write at random, and
    the probability is 16 times the share of the written bytes in `max_bytes`. Thus processes of any number and lifetime
    scan once for each sixteenth of `max_bytes` on average. Between scans the folder may be larger than `max_bytes`.
    """

    def __init__(self, folder: Path, pattern: str, max_bytes: int) -> None:
        self._folder = folder
        self._pattern = pattern
        self._max_bytes = max_bytes

    def added(self, nbytes: int) -> None:
        """Record that a file of `nbytes` was written; if a scan is due, delete the least recently used files."""
        if random.random() * self._max_bytes < nbytes * _LOOKS:
            self._trim()

    def _trim(self) -> None:
        total = 0
        for _, size, path in sorted(map(_usage, self._folder.glob(self._pattern)), reverse=True):
            total += size
            if total > self._max_bytes:
                path.unlink(missing_ok=True)


def _usage(path: Path) -> tuple[float, int, Path]:
    """The time of last use, the size and the path of a file; time and size are 0 if the file has been deleted."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0, path
    return status.st_mtime, status.st_size, path


def make_private_folder(folder: Path) -> None:
    """Create a folder of mode 700, and missing parents of default modes; an existing folder is only checked.

    ArtifactError if the folder belongs to another user, is a symbolic link, or its group or others may write to it.
    OSError if it cannot be created. Whether this user may write to an existing folder is not checked.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(os.lstat(folder), stat.S_ISDIR):
        raise ArtifactError(f"cache folder {folder} can be written by other users; make it yours, mode 700")


def _is_private(status: os.stat_result, is_kind: object) -> bool:
    right_kind = callable(is_kind) and is_kind(status.st_mode)
    return bool(right_kind and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
