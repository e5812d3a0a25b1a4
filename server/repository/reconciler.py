"""Synchronizes memory with the disk: changes by other processes, hand-copied folders, removed folders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from lathe.server.errors import NotFound, ServerError
from lathe.server.repository import policy
from lathe.server.repository.aliases import Aliases, DamagedDocument
from lathe.server.repository.housekeeping import Housekeeping
from lathe.server.repository.lifecycle import Status
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.loader import Loader, as_server_error
from lathe.server.repository.manifest import FileEntry, Manifest, describe_folder
from lathe.server.repository.model_config import CONFIG, BadConfig, read_config
from lathe.server.repository.store import Store, now_rfc3339
from lathe.server.telemetry.logs import log_fields

log = logging.getLogger(__name__)

IsSettled: TypeAlias = Callable[[str, int], bool]  # (model, version) -> whether the folder is completely written


def always_settled(model: str, version: int) -> bool:
    """Return True: each folder counts as completely written."""
    return True


class Reconciler:
    """Reconciles the models in memory with their folders."""

    def __init__(self, store: Store, models: LiveModels, loader: Loader, housekeeping: Housekeeping) -> None:
        self._store = store
        self._models = models
        self._loader = loader
        self._housekeeping = housekeeping

    async def sync(self, name: str, settled: IsSettled = always_settled) -> None:
        """Adopt new folders, load the wanted versions, then show the aliases on disk; last, tidy up.

        Also applies the configuration. Failures of adopting and loading are recorded, not raised. `settled` says
        whether a hand-copied folder is completely written; the others are left for a later sync. A model whose folder
        is gone is forgotten. A model that a call unloaded loads nothing. The last step unloads and deletes versions
        that are not needed (`Housekeeping.tidy`). Raises OSError, and as `Loader.rebuild`, except ServerError.
        """
        model = self._models.get(name)
        async with model.lock:  # without it, a list older than a visible change would revert that change
            versions = await asyncio.to_thread(self._store.versions, name)
            if not versions and name not in await asyncio.to_thread(self._store.models):
                self._forget(model)
                return
            self._models.keep(model)
            self._update_statuses(model, versions)
        await self._configure(model)
        try:
            await self._load_and_show(model, settled)
        except DamagedDocument as error:
            log.error("%s", error, extra=log_fields(model=name))
            model.show(model.aliases)
        await self._housekeeping.tidy(model)

    async def _configure(self, model: LiveModel) -> None:
        """Apply the model's config.toml; of an invalid one the error is recorded, and the previous one stays."""
        try:
            config = await asyncio.to_thread(read_config, self._store.root / model.name)
        except (BadConfig, OSError) as error:
            reason = str(error) if isinstance(error, BadConfig) else f"{CONFIG}: {error.strerror}"
            if reason != model.config_error:
                log.error("%s", reason, extra=log_fields(model=model.name))
            model.config_error = reason
        else:
            if config != model.config or model.config_error:
                model.configure(config)
            for version in model.outdated_versions:
                await self._rebuild(model, version)

    async def _rebuild(self, model: LiveModel, version: int) -> None:
        """Build a version again with the present configuration; a failure is recorded, and shown in `config_error`.

        A version that failed is not tried again before its failure is cleared (`LiveModel.clear_failures`).
        """
        if version not in model.rebuild_failures:
            try:
                await self._loader.rebuild(model, version)
                return
            except Exception as error:  # any failure: the old build answers, and the other versions are built
                if version not in model.loaded:  # unloaded meanwhile
                    return
                failure = model.rebuild_failures[version] = as_server_error(error)
                fields = log_fields(model=model.name, version=version, code=failure.code)
                log.error("%s:%d cannot be built again: %s", model.name, version, failure.message, extra=fields)
        before = f"{model.config_error};" if model.config_error else f"{CONFIG}:"
        model.config_error = f"{before} version {version}: {model.rebuild_failures[version].message}"

    def manifest(self, model: LiveModel, version: int) -> Manifest | None:
        """Return a version's manifest, for a hand-copied one the manifest made here; None if missing or damaged."""
        try:
            return self._store.manifest(model.name, version) or model.unadopted_manifests.get(version)
        except (NotFound, DamagedDocument, OSError):
            return None

    def _update_statuses(self, model: LiveModel, versions: list[int]) -> None:
        for removed in model.statuses.keys() - set(versions):
            self._housekeeping.drop(model, removed)
        for version in versions:
            model.statuses.setdefault(version, Status())

    def _forget(self, model: LiveModel) -> None:
        for version in list(model.statuses):
            self._housekeeping.drop(model, version)
        self._models.forget(model)

    async def _load_and_show(self, model: LiveModel, settled: IsSettled) -> None:
        if model.registry.find(model.name) is None:  # requests see the model, as not loaded, while it loads
            model.show(await self._aliases(model))
        if not model.is_unloaded:
            for version in await self._versions_to_adopt(model):
                if settled(model.name, version):
                    await self._load_and_adopt(model, version)
            await self._load_wanted(model)
        async with model.lock:
            model.show(await self._aliases(model))

    async def _aliases(self, model: LiveModel) -> Aliases:
        """Return the aliases on disk; of a read-only repository, as if its hand-copied versions had been adopted."""
        state = await asyncio.to_thread(self._store.state, model.name)
        for version in sorted(model.unadopted_manifests, reverse=True) if self._store.read_only else ():
            specific = model.config.version_policy.specific
            state = policy.with_first_live(state.with_high_water(version), version, specific)
        return state

    async def _versions_to_adopt(self, model: LiveModel) -> list[int]:
        """Return the hand-copied versions to load and then record as adopted, the highest first.

        Sets `model.unadopted` to all versions that are not adopted; those of them that failed to load are not returned.
        """
        async with model.lock:  # a version that is being published must not be adopted
            manifested = await asyncio.to_thread(
                lambda: {version: self.manifest(model, version) is not None for version in list(model.statuses)}
            )
            fresh = policy.unadopted_versions(await self._aliases(model), manifested)
            if self._store.read_only:
                fresh = [version for version in fresh if version not in model.unadopted_manifests]
            model.unadopted = set(fresh)
        return [version for version in fresh if version not in model.failures]

    async def _load_wanted(self, model: LiveModel) -> None:
        for version in policy.versions_to_load(await self._aliases(model), model.loadable_versions, model.chosen):
            await self._try_load(model, version)

    async def _try_load(self, model: LiveModel, version: int) -> bool:
        try:
            await self._loader.ensure(model, version)
        except ServerError:
            return False  # the loader has recorded the error
        return True

    async def _load_and_adopt(self, model: LiveModel, version: int) -> None:
        answers = version in model.loaded  # its manifest was damaged or removed since
        try:
            manifest = await asyncio.to_thread(self._store.manifest, model.name, version)
            if manifest is None:
                manifest = Manifest(await asyncio.to_thread(self._describe, model, version), now_rfc3339())
            model.unadopted_manifests[version] = manifest
            if await self._try_load(model, version):
                await self._adopt(model, version, manifest)
        except Exception as error:  # a bad folder must not prevent the other versions from being served
            model.unadopted_manifests.pop(version, None)
            failure = as_server_error(error)
            if answers:
                fields = log_fields(model=model.name, version=version, code=failure.code)
                log.error("%s:%d cannot be recorded: %s", model.name, version, failure.message, extra=fields)
                model.failures[version] = failure
                return
            if version in model.loaded:  # it loaded, but could not be adopted
                self._loader.let_go(model, version)
            model.fail(version, failure)

    def _describe(self, model: LiveModel, version: int) -> dict[str, FileEntry]:
        return describe_folder(self._store.folder(model.name, version))

    async def _adopt(self, model: LiveModel, version: int, manifest: Manifest) -> None:
        """Record a loaded hand-copied version as one of the repository's; it goes live if no version is.

        A read-only repository records nothing: there the version is only shown to requests.
        """
        model.unadopted.discard(version)
        if self._store.read_only:
            model.show(await self._aliases(model))
            return

        def change(state: Aliases) -> Aliases:
            return policy.with_first_live(state, version, model.config.version_policy.specific)

        with_signature = replace(manifest, signature=model.signature(version) or manifest.signature)
        async with model.lock:
            outcome = await asyncio.to_thread(self._store.adopt, model.name, version, with_signature, change)
            model.unadopted_manifests.pop(version, None)
            model.show(outcome.record.state)
