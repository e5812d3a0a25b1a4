"""Looks at the repository now and then: other servers' changes, folders copied in by hand, folders gone;
and at the devices that models run on."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from server.repository.modelconfig import CONFIG
from server.repository.rollout import Rollout
from server.repository.store import ALIASES, Store

log = logging.getLogger(__name__)

_RETRY = 15.0  # seconds after which what failed for a passing reason is tried again

FileLook = tuple[str, int, int, int]  # name, inode, size, time of the last change (ns)


class ModelLook(NamedTuple):
    """What a model's folder looks like from outside, without reading a file."""

    files: tuple[FileLook, ...]  # aliases and configuration
    versions: Mapping[int, tuple[FileLook, ...]]


@dataclass(slots=True)
class _Seen:
    look: tuple[FileLook, ...]
    since: float  # monotonic seconds


class Watcher:
    """Polls, and lets the rollout sync each model that changed. ``settle`` is how long a folder must lie still."""

    def __init__(self, store: Store, rollout: Rollout, interval: float, settle: float) -> None:
        self._store = store
        self._rollout = rollout
        self._interval = interval
        self._settle = settle
        self._looks: dict[str, ModelLook] = {}
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._waiting: set[tuple[str, int]] = set()  # folders that were not still at the last sync
        self._retried = time.monotonic()

    async def start(self) -> None:
        """Take the first look, and bring what it finds into memory; folders copied in before are taken as they are."""
        self._looks = await asyncio.to_thread(self._look)
        await self._rollout.load_all()

    async def run(self) -> None:
        """Look for ever; a look that fails is followed by the next."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.poll()
            except OSError as error:
                log.warning("the model repository cannot be looked at: %s", error.strerror)
            except Exception:
                log.exception("a change of the model repository could not be followed")

    async def poll(self) -> None:
        """Look once, and act on what changed."""
        await self._rollout.renew()
        looks = await asyncio.to_thread(self._look)
        changed = {name for name in looks if self._looks.get(name) != looks[name]}
        changed |= {model.name for model in self._rollout.catalog.models()} - looks.keys()
        still = {(name, version) for name, version in self._waiting if self.settled(name, version)}
        self._waiting -= still
        for name in sorted(changed):
            self._rollout.forgive(name, self._touched(name, looks.get(name)))
        self._looks = looks
        await asyncio.gather(*(self._sync(name) for name in changed | {name for name, _ in still} | self._retry()))

    def settled(self, model: str, version: int) -> bool:
        """Say whether a version's folder has not changed for long enough; else it is looked at again later."""
        seen = self._seen.get((model, version))
        is_still = seen is not None and time.monotonic() - seen.since >= self._settle
        if not is_still:
            self._waiting.add((model, version))
        return is_still

    async def _sync(self, name: str) -> None:
        await self._rollout.sync(name, self.settled)

    def _retry(self) -> set[str]:
        if time.monotonic() - self._retried < _RETRY:
            return set()
        self._retried = time.monotonic()
        return set(self._rollout.forgive_passing())

    def _touched(self, name: str, look: ModelLook | None) -> list[int]:
        before = self._looks.get(name)
        old, new = (before.versions if before else {}), (look.versions if look else {})
        return [version for version in old.keys() | new.keys() if old.get(version) != new.get(version)]

    def _look(self) -> dict[str, ModelLook]:
        looks = {name: self._look_at(name) for name in self._store.models()}
        now = time.monotonic()
        present = {(name, v): look for name, model in looks.items() for v, look in model.versions.items()}
        for key, look in present.items():
            seen = self._seen.get(key)
            if seen is None:
                self._seen[key] = _Seen(look, now - _age(look))
            elif seen.look != look:
                self._seen[key] = _Seen(look, now)
        for gone in self._seen.keys() - present.keys():
            del self._seen[gone]
        return looks

    def _look_at(self, name: str) -> ModelLook:
        root = self._store.root / name
        return ModelLook(
            tuple(_files(root, only={ALIASES, CONFIG})),
            {version: tuple(_files(root / str(version))) for version in self._store.versions(name)},
        )


def _files(folder: Path, only: Collection[str] | None = None) -> Iterator[FileLook]:
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if only is None or entry.name in only:
                status = entry.stat(follow_symlinks=False)
                yield entry.name, status.st_ino, status.st_size, status.st_ctime_ns
    except (FileNotFoundError, NotADirectoryError):
        return


def _age(look: tuple[FileLook, ...]) -> float:
    """Return for how many seconds a folder seen for the first time has surely been still, by the files' own times."""
    newest = max((changed for _, _, _, changed in look), default=time.time_ns())
    return max(0.0, (time.time_ns() - newest) / 1e9)
