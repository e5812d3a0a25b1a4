"""What the repository looks like from outside: models, versions, states."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from server.errors import NotFound
from server.repository.aliases import Aliases
from server.repository.diskside import DiskSide
from server.repository.journal import Record
from server.repository.lifecycle import Status
from server.repository.live import LiveModel, LiveModels
from server.repository.manifest import Manifest
from server.repository.names import LIVE
from server.repository.store import Store, storage_errors


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version."""

    version: int
    status: Status
    manifest: Manifest | None  # None: hand-copied and not taken in yet, or damaged
    aliases: tuple[str, ...]  # that name it


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model; ``answering`` says which version answers for each alias that anything answers for."""

    name: str
    aliases: Aliases
    answering: Mapping[str, int]
    versions: tuple[int, ...]
    config_error: str = ""
    failure: str = ""  # why the live version is not loaded; where there is none, why the newest is not

    @property
    def ready(self) -> bool:
        """Whether a request that names no version is answered."""
        return LIVE in self.answering


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index."""

    name: str
    version: int
    status: Status


class Catalog:
    """Questions about what there is; nothing here changes anything."""

    def __init__(self, store: Store, models: LiveModels, disk: DiskSide) -> None:
        self._store = store
        self._models = models
        self._disk = disk

    def index(self) -> list[IndexEntry]:
        """Return every version with its state."""
        return [
            IndexEntry(model.name, version, model.status(version))
            for model in self._models
            for version in sorted(model.statuses)
        ]

    def models(self) -> list[ModelInfo]:
        """Return all models whose aliases are known."""
        return [_describe(model) for model in self._models if self._models.registry.find(model.name) is not None]

    def model(self, name: str) -> ModelInfo:
        """Return one model; raises NotFound, and until its aliases are known while the server starts Unavailable."""
        return _describe(self._known(name))

    async def versions(self, name: str) -> list[VersionInfo]:
        """Return a model's versions, without those that are deleted meanwhile; raises NotFound."""
        found = []
        for version in self.model(name).versions:
            with suppress(NotFound):
                found.append(await self.version(name, version))
        return found

    async def version(self, name: str, version: int) -> VersionInfo:
        """Return one version; raises NotFound, and Unavailable as :meth:`model`."""
        model = self._known(name)
        if version not in model.statuses:
            raise NotFound(f"model {name!r} has no version {version}")
        manifest = await asyncio.to_thread(self._disk.manifest, model, version)
        if manifest is None:
            async with model.lock:  # its folder may just have been removed: what shows that is under way
                pass
        if version not in model.statuses:
            raise NotFound(f"model {name!r} has no version {version}")
        aliases = tuple(sorted(a for a, alias in model.aliases.aliases.items() if alias.version == version))
        return VersionInfo(version, model.status(version), manifest, aliases)

    def _known(self, name: str) -> LiveModel:
        """Return a model whose aliases are known; raises NotFound, while the server starts Unavailable."""
        model = self._models.known(name)
        self._models.registry.view(name)
        return model

    async def audit(self, name: str) -> list[Record]:
        """Return the changes made to a model, oldest first; raises NotFound."""
        with storage_errors("reading the log"):
            return await asyncio.to_thread(self._store.audit, self._models.known(name).name)


def _describe(model: LiveModel) -> ModelInfo:
    versions = tuple(sorted(model.statuses))
    answering = model.answering()
    failure = "" if LIVE in answering else _failure(model)
    return ModelInfo(model.name, model.aliases, answering, versions, model.config_error, failure)


def _failure(model: LiveModel) -> str:
    named = model.aliases.aliases.get(LIVE)
    version = named.version if named else max(model.statuses, default=0)
    status = model.statuses.get(version)
    return (
        f"version {version} is {status.state.value}" + (f": {status.reason}" if status.reason else "") if status else ""
    )
