"""Read-only queries about models, versions and their states."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from lathe.server.errors import NotFound
from lathe.server.repository.aliases import Aliases
from lathe.server.repository.journal import Record
from lathe.server.repository.lifecycle import Status
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.manifest import Manifest
from lathe.server.repository.names import LIVE_ALIAS
from lathe.server.repository.reconciler import Reconciler
from lathe.server.repository.store import Store, storage_errors


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """A version as the management API reports it."""

    version: int
    status: Status
    manifest: Manifest | None  # None: hand-copied and not adopted yet, or damaged
    aliases: tuple[str, ...]  # the aliases that name it


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as the management API reports it; `answering` maps each alias that answers to its version."""

    name: str
    aliases: Aliases
    answering: Mapping[str, int]
    versions: tuple[int, ...]
    config_error: str = ""
    failure: str = ""  # why the live version, or if there is none the newest, is not loaded

    @property
    def ready(self) -> bool:
        """Whether requests without a version are answered."""
        return LIVE_ALIAS in self.answering


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One entry of the repository index."""

    name: str
    version: int
    status: Status


class Catalog:
    """Read-only queries; nothing here changes a model."""

    def __init__(self, store: Store, models: LiveModels, disk: Reconciler) -> None:
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
        """Return one model; raises NotFound, or Unavailable while the server starts and its aliases are not known."""
        return _describe(self._known(name))

    async def versions(self, name: str) -> list[VersionInfo]:
        """Return a model's versions, without those deleted during the call; raises NotFound, Unavailable as `model`."""
        found = []
        for version in self.model(name).versions:
            with suppress(NotFound):
                found.append(await self.version(name, version))
        return found

    async def version(self, name: str, version: int) -> VersionInfo:
        """Return one version; raises NotFound, or Unavailable like `model`."""
        model = self._known(name)
        if version not in model.statuses:
            raise NotFound(f"model {name!r} has no version {version}")
        manifest = await asyncio.to_thread(self._disk.manifest, model, version)
        if manifest is None:
            async with model.lock:  # its folder may just have been removed: wait until that change is visible
                pass
        if version not in model.statuses:
            raise NotFound(f"model {name!r} has no version {version}")
        aliases = tuple(sorted(a for a, alias in model.aliases.aliases.items() if alias.version == version))
        return VersionInfo(version, model.status(version), manifest, aliases)

    def _known(self, name: str) -> LiveModel:
        """Return a model whose aliases are known; raises NotFound, or Unavailable while the server starts."""
        model = self._models.known(name)
        self._models.registry.view(name)
        return model

    async def audit(self, name: str) -> list[Record]:
        """Return the newest changes of a model, at most `journal.MAX_REMEMBERED`, oldest first.

        Raises NotFound, or Unavailable if the log cannot be read or changes at each attempt to read it.
        """
        with storage_errors("reading the log"):
            return await asyncio.to_thread(self._store.audit, self._models.known(name).name)


def _describe(model: LiveModel) -> ModelInfo:
    versions = tuple(sorted(model.statuses))
    answering = model.answering()
    failure = "" if LIVE_ALIAS in answering else _failure(model)
    return ModelInfo(model.name, model.aliases, answering, versions, model.config_error, failure)


def _failure(model: LiveModel) -> str:
    alias = model.aliases.aliases.get(LIVE_ALIAS)
    version = alias.version if alias else max(model.statuses, default=0)
    status = model.statuses.get(version)
    return (
        f"version {version} is {status.state.value}" + (f": {status.reason}" if status.reason else "") if status else ""
    )
