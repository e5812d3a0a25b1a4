"""Object files on disk. They are native code, so a file is used only if this user wrote it and its digest holds."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import tempfile
from pathlib import Path

from core.errors import ArtifactError

_DIGEST_BYTES = 32
_LOOKS = 16  # while one process adds as much as fits
_PUTS_PER_LOOK = 256  # by chance: processes may be too short-lived to add much


class ObjectCache:
    """A folder of `<key>.o` files, each the SHA-256 of the object followed by the object.

    Several processes may share it: files appear by rename, and a damaged or foreign one counts as absent.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        """Creates the folder, open to this user only. ArtifactError when somebody else could write to it.

        `max_bytes` bounds what is kept: beyond it the objects not used for longest go.
        """
        self.folder = folder
        self._quota = Quota(folder, "*.o", max_bytes) if max_bytes is not None else None
        own_folder(folder)

    def get(self, key: str) -> bytes | None:
        """The object of this key, or None when there is none that can be trusted."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not _only_ours(os.fstat(descriptor), stat.S_ISREG):
                return None
            content = file.read()
            digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(data).digest() != digest:
                return None
            os.utime(descriptor)  # the time of last use, for eviction
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep an object; whoever reads at the same time sees all of it or nothing."""
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(temporary, self._path(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        if self._quota is not None:
            self._quota.added(_DIGEST_BYTES + len(data))

    def names(self) -> list[str]:
        """The keys of all objects that are there, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.o"))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.o"


class Quota:
    """Bounds what files of a folder take: those not used for longest (by modification time) go.

    Looking at all of them takes long where there are many, so it is done when much was added, or rarely by chance.
    """

    def __init__(self, folder: Path, pattern: str, max_bytes: int) -> None:
        self._folder = folder
        self._pattern = pattern
        self._max_bytes = max_bytes
        self._added = 0

    def added(self, nbytes: int) -> None:
        """Note a new file, and make room if it is time to."""
        self._added += nbytes
        if self._added * _LOOKS > self._max_bytes or random.randrange(_PUTS_PER_LOOK) == 0:
            self._added = 0
            self._trim()

    def _trim(self) -> None:
        total = 0
        for _, size, path in sorted(map(_usage, self._folder.glob(self._pattern)), reverse=True):
            total += size
            if total > self._max_bytes:
                path.unlink(missing_ok=True)


def _usage(path: Path) -> tuple[float, int, Path]:
    """When a file was last used and how large it is; a file that is gone by now counts nothing."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0, path
    return status.st_mtime, status.st_size, path


def own_folder(folder: Path) -> None:
    """Create a folder that only this user can write to. ArtifactError when one is there that others can."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _only_ours(os.lstat(folder), stat.S_ISDIR):
        raise ArtifactError(f"cache folder {folder} can be written by other users; make it yours, mode 700")


def _only_ours(status: os.stat_result, is_kind: object) -> bool:
    right_kind = callable(is_kind) and is_kind(status.st_mode)
    return bool(right_kind and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
