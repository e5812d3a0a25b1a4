"""Brings memory in line with the disk: what other processes changed, what was copied in by hand, what is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from server.errors import NotFound, ServerError
from server.repository import policy
from server.repository.aliases import Aliases, DamagedDocument
from server.repository.housekeeping import Housekeeping
from server.repository.lifecycle import Status
from server.repository.live import LiveModel, LiveModels
from server.repository.loader import Loader, as_server_error
from server.repository.manifest import FileEntry, Manifest, describe_folder
from server.repository.modelconfig import CONFIG, BadConfig, ModelConfig, read_config
from server.repository.store import Store, now
from server.telemetry.logs import about

log = logging.getLogger(__name__)

Settled: TypeAlias = Callable[[str, int], bool]  # whether a version's folder is not being written any more


def always(model: str, version: int) -> bool:
    """Take every folder as it is."""
    return True


class DiskSide:
    """Looks at a model's folder and does what follows from it."""

    def __init__(self, store: Store, models: LiveModels, loader: Loader, housekeeping: Housekeeping) -> None:
        self._store = store
        self._models = models
        self._loader = loader
        self._housekeeping = housekeeping

    async def sync(self, name: str, settled: Settled = always) -> None:
        """Take in new folders, load what is wanted, then show what the disk says. Failures are noted, never raised."""
        model = self._models.get(name)
        async with model.lock:  # a list from before a change that is shown by now would take the change back
            versions = await asyncio.to_thread(self._store.versions, name)
            if not versions and name not in await asyncio.to_thread(self._store.models):
                self._forget(model)
                return
            self._models.keep(model)
            self._note(model, versions)
        await self._configure(model)
        try:
            await self._follow(model, settled)
        except DamagedDocument as error:
            log.error("%s", error, extra=about(model=name))
            model.show(model.aliases)
        await self._housekeeping.tidy(model)

    async def _configure(self, model: LiveModel) -> None:
        """Follow the configuration beside the model; a bad one is noted, and the one before it stays."""
        try:
            config = await asyncio.to_thread(read_config, self._store.root / model.name)
        except (BadConfig, OSError) as error:
            reason = str(error) if isinstance(error, BadConfig) else f"{CONFIG}: {error.strerror}"
            if reason != model.config_error:
                log.error("%s", reason, extra=about(model=model.name))
            model.config_error = reason
        else:
            if config != model.config or model.config_error:
                await self._follow_config(model, config)

    async def _follow_config(self, model: LiveModel, config: ModelConfig) -> None:
        """Follow a configuration; other code, and another meaning of the leading dimension, once that is loaded."""
        before, rebuilt = model.config, list(model.loaded)
        model.configure(config)
        for version in rebuilt if (config.compile, config.batches) != (before.compile, before.batches) else ():
            try:
                await self._loader.rebuild(model, version)
            except ServerError as error:
                model.config_error = f"{CONFIG}: version {version}: {error.message}"
                log.error("%s", model.config_error, extra=about(model=model.name))

    def manifest(self, model: LiveModel, version: int) -> Manifest | None:
        """Return a version's manifest, None where it has none or a damaged one."""
        try:
            return self._store.manifest(model.name, version) or model.guests.get(version)
        except (NotFound, DamagedDocument, OSError):
            return None

    def _note(self, model: LiveModel, versions: list[int]) -> None:
        for gone in model.statuses.keys() - set(versions):
            self._housekeeping.drop(model, gone)
        for version in versions:
            model.statuses.setdefault(version, Status())

    def _forget(self, model: LiveModel) -> None:
        for version in list(model.statuses):
            self._housekeeping.drop(model, version)
        self._models.forget(model)

    async def _follow(self, model: LiveModel, settled: Settled) -> None:
        if model.registry.find(model.name) is None:  # so that it is known, if not answering, while it loads
            model.show(await self._state(model))
        if not model.unloaded:
            for version in await self._fresh(model):
                if settled(model.name, version):
                    await self._take_in(model, version)
            await self._load_wanted(model)
        async with model.lock:
            model.show(await self._state(model))

    async def _state(self, model: LiveModel) -> Aliases:
        """Return the aliases on disk; of a repository that cannot be written, as they would be with its new folders."""
        state = await asyncio.to_thread(self._store.state, model.name)
        for version in sorted(model.guests, reverse=True) if self._store.read_only else ():
            specific = model.config.version_policy.specific
            state = policy.first_goes_live(state.raised(version), version, specific)
        return state

    async def _fresh(self, model: LiveModel) -> list[int]:
        """Return the folders to take in."""
        async with model.lock:  # a version that is being published is not fresh
            manifested = await asyncio.to_thread(
                lambda: {version: self.manifest(model, version) is not None for version in list(model.statuses)}
            )
            fresh = policy.unadopted(await self._state(model), manifested)
            if self._store.read_only:
                fresh = [version for version in fresh if version not in model.guests]
            model.untaken = set(fresh)
        return [version for version in fresh if version not in model.failures]

    async def _load_wanted(self, model: LiveModel) -> None:
        for version in policy.wanted(await self._state(model), model.candidates, model.chosen):
            await self._try_to_load(model, version)

    async def _try_to_load(self, model: LiveModel, version: int) -> bool:
        try:
            await self._loader.ensure(model, version)
        except ServerError:
            return False  # the loader has noted it
        return True

    async def _take_in(self, model: LiveModel, version: int) -> None:
        try:
            manifest = await asyncio.to_thread(self._store.manifest, model.name, version)
            if manifest is None:
                manifest = Manifest(await asyncio.to_thread(self._describe, model, version), now())
            model.guests[version] = manifest
            if await self._try_to_load(model, version):
                await self._adopt(model, version, manifest)
        except Exception as error:  # one bad folder must not keep the others from being served
            model.guests.pop(version, None)
            model.fail(version, as_server_error(error))

    def _describe(self, model: LiveModel, version: int) -> dict[str, FileEntry]:
        return describe_folder(self._store.folder(model.name, version))

    async def _adopt(self, model: LiveModel, version: int, manifest: Manifest) -> None:
        """Write down that a hand-copied version is one of the repository's."""
        model.untaken.discard(version)
        if self._store.read_only:
            model.show(await self._state(model))
            return

        def change(state: Aliases) -> Aliases:
            return policy.first_goes_live(state, version, model.config.version_policy.specific)

        known = replace(manifest, signature=model.signature(version) or manifest.signature)
        async with model.lock:
            outcome = await asyncio.to_thread(self._store.adopt, model.name, version, known, change)
            model.guests.pop(version, None)
            model.show(outcome.record.state)
