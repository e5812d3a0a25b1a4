"""Durable writes: files and folders appear complete or not at all, even if the process or the machine crashes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lathe.core.files import replace_file, sync_folder

TEMPORARY_SUFFIX = ".new"
_kept_free = 0  # bytes of the disk that `write_folder` leaves free


def reserve_disk_space(size: int) -> None:
    """Make `write_folder` leave `size` bytes of the disk free in this process, as if the disk were full earlier."""
    global _kept_free
    _kept_free = size


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary file, synced and renamed. After an OSError the old file is unchanged.

    Only if the flush of the folder fails, the file is the new one already. The OSError has the name of the file without
    its folder, as that of `write_folder` does.
    """
    try:
        replace_file(path, content, durable=True)
    except OSError as error:
        raise _with_file_name(error, path) from None


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder with `files`, content by name: into a temporary folder, synced and renamed to `path`.

    An existing folder at `path` is removed just before the rename: after a crash in between there is none. After an
    OSError no incomplete folder is left. OSError (ENOSPC), too, if fewer bytes would be left on the disk than
    `reserve_disk_space` demands; a folder to be replaced still counts as used.
    """
    aside = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        _remove(aside)
        aside.mkdir(parents=True)
        _check_free_space(aside, sum(map(len, files.values())))
        for name, content in files.items():
            _write(aside / name, content)
        sync_folder(aside)
        _remove(path)
        os.rename(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _with_file_name(error, path) from None


def _check_free_space(folder: Path, size: int) -> None:
    if not _kept_free:
        return
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free - size < _kept_free:
        message = f"{size} bytes do not fit: {free} are free on the disk, and at least {_kept_free} are kept"
        raise OSError(errno.ENOSPC, message)


def _with_file_name(error: OSError, path: Path) -> OSError:
    """The same error, with the name of the file but without its folder, because clients of a server read it."""
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
