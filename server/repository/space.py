"""Disk space that is kept free, so that what is there can still be managed: journals, aliases, deletions.

As etcd does (alarm NOSPACE): what brings new files is refused before the disk is full; everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from server.errors import StorageFull
from server.settings import Settings

Free: TypeAlias = Callable[[Path], int]

log = logging.getLogger("lathe.repository")


def free_bytes(folder: Path) -> int:
    """Return what this process may still write to the folder's file system; raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Space:
    """The file system of one folder. May be used from any thread."""

    def __init__(self, folder: Path, kept: int, name: str, free: Free = free_bytes) -> None:
        """``kept``: bytes that new files leave free. ``name``: what the folder is called in errors and metrics."""
        self.folder = folder
        self.kept = kept
        self.name = name
        self.free: int | None = None  # bytes, when looked at last; None where the system does not say
        self._free_bytes = free

    @property
    def is_full(self) -> bool:
        """Whether new files are refused, as of the last look."""
        return self.free is not None and self.free < self.kept

    def look(self) -> None:
        """Ask the system. May block."""
        try:
            self.free = self._free_bytes(self.folder)
        except OSError:
            self.free = None  # not there yet, or gone: whoever writes to it will say why it cannot

    def tell(self) -> None:
        """Look, and log what has changed since the last look. May block."""
        before = self.is_full
        self.look()
        if self.is_full and not before:
            log.error(
                "%s: %d bytes are free on the disk, fewer than the %d that are kept (LATHE_MIN_FREE_DISK): uploads, "
                "datasets and jobs are refused",
                self.name,
                self.free,
                self.kept,
            )
        elif before and not self.is_full:
            log.info("%s: there is space on the disk again", self.name)

    def check(self) -> None:
        """Raise StorageFull where less is free than is kept. May block."""
        self.look()
        if self.is_full:
            raise StorageFull(
                f"{self.name}: {self.free} bytes are free on the disk, and at least {self.kept} are kept: delete some"
            )

    async def watch(self, interval: float) -> None:
        """Look every ``interval`` seconds."""
        while True:
            await asyncio.to_thread(self.tell)
            await asyncio.sleep(interval)


def model_space(settings: Settings) -> Space:
    """Return the space of the model repository."""
    return Space(settings.model_repo, settings.min_free_disk, "models")


def state_space(settings: Settings) -> Space:
    """Return the space of datasets and jobs."""
    return Space(settings.state_folder, settings.min_free_disk, "datasets and jobs")
