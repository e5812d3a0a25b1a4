"""Polls the repository for changes by other servers and by hand, and the devices of models for faults."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lathe.server.repository.model_config import CONFIG
from lathe.server.repository.rollout import Rollout
from lathe.server.repository.store import ALIASES, Store

log = logging.getLogger(__name__)

_RETRY = 15.0  # seconds between retries of transient failures

FileStatus = tuple[str, int, int, int]  # name, inode, size, time of the last change (ns)


class FolderStatus(NamedTuple):
    """A fingerprint of a model's folder, from file status alone."""

    files: tuple[FileStatus, ...]  # aliases and configuration
    versions: Mapping[int, tuple[FileStatus, ...]]


@dataclass(slots=True)
class _Seen:
    look: tuple[FileStatus, ...]
    since: float  # monotonic seconds


class Watcher:
    """Polls, and syncs each model that changed. A new version folder must be unchanged for `settle` seconds."""

    def __init__(self, store: Store, rollout: Rollout, interval: float, settle: float) -> None:
        self._store = store
        self._rollout = rollout
        self._interval = interval
        self._settle = settle
        self._looks: dict[str, FolderStatus] = {}
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._waiting: set[tuple[str, int]] = set()  # folders that were still changing at the last sync
        self._last_retry = time.monotonic()

    async def start(self) -> None:
        """Take the first look, and load all models; folders copied in before are adopted without waiting."""
        self._looks = await asyncio.to_thread(self._look)
        await self._rollout.load_all()

    async def run(self) -> None:
        """Poll for ever; errors of one poll are logged."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.poll()
            except OSError as error:
                log.warning("the model repository cannot be read: %s", error.strerror)
            except Exception:
                log.exception("a change of the model repository could not be applied")

    async def poll(self) -> None:
        """Reload versions after device faults; look once, and sync models whose folders changed or that are retried.

        Raises OSError if the repository cannot be read, or the first error of a sync; the other syncs continue.
        """
        await self._rollout.renew()
        looks = await asyncio.to_thread(self._look)
        changed = {name for name in looks if self._looks.get(name) != looks[name]}
        changed |= {model.name for model in self._rollout.catalog.models()} - looks.keys()
        settled_folders = {(name, version) for name, version in self._waiting if self.settled(name, version)}
        self._waiting -= settled_folders
        for name in sorted(changed):
            self._rollout.clear_failures(name, self._changed_versions(name, looks.get(name)))
        self._looks = looks
        await asyncio.gather(
            *(self._sync(name) for name in changed | {name for name, _ in settled_folders} | self._models_to_retry())
        )

    def settled(self, model: str, version: int) -> bool:
        """Whether a version's folder has been unchanged long enough; if not, a later poll syncs its model again."""
        seen = self._seen.get((model, version))
        is_still = seen is not None and time.monotonic() - seen.since >= self._settle
        if not is_still:
            self._waiting.add((model, version))
        return is_still

    async def _sync(self, name: str) -> None:
        await self._rollout.sync(name, self.settled)

    def _models_to_retry(self) -> set[str]:
        if time.monotonic() - self._last_retry < _RETRY:
            return set()
        self._last_retry = time.monotonic()
        return set(self._rollout.clear_transient_failures())

    def _changed_versions(self, name: str, look: FolderStatus | None) -> list[int]:
        before = self._looks.get(name)
        old, new = (before.versions if before else {}), (look.versions if look else {})
        return [version for version in old.keys() | new.keys() if old.get(version) != new.get(version)]

    def _look(self) -> dict[str, FolderStatus]:
        looks = {name: self._look_at(name) for name in self._store.models()}
        now = time.monotonic()
        present = {(name, v): look for name, model in looks.items() for v, look in model.versions.items()}
        for key, look in present.items():
            seen = self._seen.get(key)
            if seen is None:
                self._seen[key] = _Seen(look, now - _age(look))
            elif seen.look != look:
                self._seen[key] = _Seen(look, now)
        for removed in self._seen.keys() - present.keys():
            del self._seen[removed]
        return looks

    def _look_at(self, name: str) -> FolderStatus:
        root = self._store.root / name
        return FolderStatus(
            tuple(_files(root, only={ALIASES, CONFIG})),
            {version: tuple(_files(root / str(version))) for version in self._store.versions(name)},
        )


def _files(folder: Path, only: Collection[str] | None = None) -> Iterator[FileStatus]:
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if only is None or entry.name in only:
                status = entry.stat(follow_symlinks=False)
                yield entry.name, status.st_ino, status.st_size, status.st_ctime_ns
    except (FileNotFoundError, NotADirectoryError):
        return


def _age(look: tuple[FileStatus, ...]) -> float:
    """Return the seconds since the last change of a folder's files, by their timestamps."""
    newest = max((changed for _, _, _, changed in look), default=time.time_ns())
    return max(0.0, (time.time_ns() - newest) / 1e9)
