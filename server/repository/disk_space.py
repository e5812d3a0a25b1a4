"""A reserve of free disk space, so that journals, aliases and deletions still work on a nearly full disk.

New files are refused before the disk is full, and all other operations continue, as in etcd (alarm NOSPACE).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from lathe.server.errors import StorageFull
from lathe.server.settings import Settings

FreeBytes: TypeAlias = Callable[[Path], int]

log = logging.getLogger("lathe.repository")


def free_bytes(folder: Path) -> int:
    """Return the bytes that this process may still write to the folder's file system; raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class DiskSpace:
    """The free space on the file system of one folder; usable from any thread."""

    def __init__(self, folder: Path, kept: int, name: str, free: FreeBytes = free_bytes) -> None:
        """`kept`: bytes that new files must leave free. `name`: the folder's name in errors and metrics."""
        self.folder = folder
        self.kept = kept
        self.name = name
        self.free: int | None = None  # bytes at the last look; None if unknown
        self._free_bytes = free

    @property
    def is_full(self) -> bool:
        """Whether new files are refused, as of the last look; False if the free bytes are unknown."""
        return self.free is not None and self.free < self.kept

    def look(self) -> None:
        """Read the free bytes into `free`; None if they cannot be read, as of a missing folder. May block."""
        try:
            self.free = self._free_bytes(self.folder)
        except OSError:
            self.free = None  # the folder is missing: writing to it reports the error

    def tell(self) -> None:
        """Update `free`, and log if `is_full` has changed. May block."""
        before = self.is_full
        self.look()
        if self.is_full and not before:
            log.error(
                "%s: %d bytes are free on the disk, fewer than the reserve of %d (LATHE_MIN_FREE_DISK): uploads, "
                "datasets and jobs are refused",
                self.name,
                self.free,
                self.kept,
            )
        elif before and not self.is_full:
            log.info("%s: there is space on the disk again", self.name)

    def check(self) -> None:
        """Raise StorageFull if less than the reserve is free, but not if the free bytes are unknown. May block."""
        self.look()
        if self.is_full:
            raise StorageFull(
                f"{self.name}: {self.free} bytes are free on the disk, expected at least {self.kept}: delete some"
            )

    async def watch(self, interval: float) -> None:
        """Call `tell` at once, then every `interval` seconds, until cancelled."""
        while True:
            await asyncio.to_thread(self.tell)
            await asyncio.sleep(interval)


def model_space(settings: Settings) -> DiskSpace:
    """Return the space of the model repository."""
    return DiskSpace(settings.model_repo, settings.min_free_disk, "models")


def state_space(settings: Settings) -> DiskSpace:
    """Return the space of datasets and jobs."""
    return DiskSpace(settings.state_folder, settings.min_free_disk, "datasets and jobs")
