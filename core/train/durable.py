"""Files that are there whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

ASIDE = ".new"
_kept = 0  # bytes of the disk that folders leave free


def keep_free(size: int) -> None:
    """Let this process's folders leave so many bytes of the disk free: for it the disk is full before it is."""
    global _kept
    _kept = size


def write_file(path: Path, content: bytes) -> None:
    """Write a file in one step: aside, synchronised, renamed. OSError leaves what was there."""
    aside = path.with_name(path.name + ASIDE)
    try:
        _write(aside, content)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise _named(error, path) from None
    sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder of files appear in one step, in place of what is there. OSError leaves nothing new behind.

    So it does where fewer bytes would be left than :func:`keep_free` says; what is replaced counts until it is.
    """
    aside = path.with_name(path.name + ASIDE)
    try:
        _remove(aside)
        aside.mkdir(parents=True)
        _check_room(aside, sum(map(len, files.values())))
        for name, content in files.items():
            _write(aside / name, content)
        sync_folder(aside)
        _remove(path)
        os.rename(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _named(error, path) from None


def sync_folder(path: Path) -> None:
    """Names in the folder outlive the machine's stopping."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_room(folder: Path, size: int) -> None:
    if not _kept:
        return
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free - size < _kept:
        told = f"{size} bytes do not fit: {free} are free on the disk, and at least {_kept} are kept"
        raise OSError(errno.ENOSPC, told)


def _named(error: OSError, path: Path) -> OSError:
    """The error, saying what could not be written; where that is, is nobody's business who reads it far away."""
    error.filename = path.name
    return error


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
