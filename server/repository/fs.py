"""File system calls: the repository makes all its changes on disk through them.

Production uses `Fs` itself. Tests use a double that records the calls, kills the process at one of them, makes one
fail, or replays what the disk would hold after a power failure.
"""

from __future__ import annotations

import os
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class Fs:
    """The operating system's calls, one to one. After a failed `sync` the caller must fail: a retry may lose data."""

    def create(self, path: Path) -> int:
        """Create a file and open it for writing; returns its descriptor. FileExistsError if it exists."""
        return os.open(path, _NEW, 0o644)

    def replace(self, path: Path) -> int:
        """Open an empty file for writing; returns its descriptor. An existing file loses its content."""
        return os.open(path, _REPLACE, 0o644)

    def append(self, path: Path) -> int:
        """Open a file for writing at its end, and create it if it is missing; returns its descriptor."""
        return os.open(path, _APPEND, 0o644)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to `size` bytes."""
        os.truncate(path, size)

    def sync(self, fd: int) -> None:
        """Make the file's content durable (fsync)."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or a folder atomically; an existing file `target` is replaced."""
        os.rename(source, target)

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        os.mkdir(path, 0o755)

    def unlink(self, path: Path) -> None:
        """Remove one file."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove one empty folder."""
        os.rmdir(path)

    def sync_dir(self, path: Path) -> None:
        """Make a folder's entries durable (fsync)."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_folders(fs: Fs, *folders: Path) -> None:
    """Make the folders that are missing, in the order given; their parents must exist."""
    for folder in folders:
        if not folder.is_dir():
            try:
                fs.mkdir(folder)
            except FileExistsError:
                continue  # another process was faster


def remove_tree(fs: Fs, folder: Path) -> None:
    """Remove a folder with its content, if it exists; symbolic links are removed, not followed."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(fs, Path(entry.path))
        else:
            fs.unlink(Path(entry.path))
    fs.rmdir(folder)
