"""Replaces files atomically, so that readers see the whole old file or the whole new one; opens plain files."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, durable: bool = False, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Context manager: a new binary file, which replaces `path` when the block ends; an error leaves `path` as it was.

    `durable`: when the context manager returns, the content and the name of the file are on disk (fsync), and survive a
    power failure. `mode`: permissions of the new file, less the umask. OSError if the folder cannot be written or the
    disk is full; only if the flush of the folder fails, `path` has been replaced already.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def replace_file(path: Path, content: bytes, durable: bool = False, mode: int = 0o644) -> None:
    """Write `content` to `path` atomically; `durable`, `mode` and errors are those of `replacing`."""
    with replacing(path, durable, mode) as file:
        file.write(content)


def sync_folder(path: Path) -> None:
    """Flush a folder to disk (fsync), so that names created or replaced in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading, also through links; OSError for a folder, and for pipes and devices.

    Opening a named pipe would wait until another process writes to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, os.strerror(code) if code == errno.EISDIR else "not a plain file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
