"""Unloads versions that are not needed, deletes old versions, and shrinks the artifact cache."""

from __future__ import annotations

import asyncio
import logging

from lathe.server.errors import ServerError
from lathe.server.repository import policy
from lathe.server.repository.artifacts import ArtifactCache
from lathe.server.repository.live_models import LiveModel
from lathe.server.repository.loader import Loader
from lathe.server.repository.store import Origin, Outcome, Store
from lathe.server.telemetry.logs import log_fields

log = logging.getLogger(__name__)


class Housekeeping:
    """Unloading and retention, after each change; deletion on request."""

    def __init__(self, store: Store, loader: Loader, cache: ArtifactCache, keep_versions: int) -> None:
        self._store = store
        self._loader = loader
        self._cache = cache
        self._keep_versions = keep_versions
        loader.pipelines.released = self._schedule_tidy

    async def tidy(self, model: LiveModel) -> None:
        """Unload a model's unneeded versions, delete those beyond retention, shrink the artifact cache.

        Needed are the versions that should be in memory (`policy.versions_to_load`), that answer, or that are pinned.
        In a read-only repository no version is deleted.
        """
        keep = {
            *policy.versions_to_load(model.aliases, model.loadable_versions, model.chosen),
            *model.answering().values(),
            *+model.pinned,
        }
        for version in [version for version in model.loaded if version not in keep]:
            self._loader.let_go(model, version)
        if self._store.read_only is None:
            for version in await self._expired(model):
                await self._delete_unless_pinned(model, version)
        await asyncio.to_thread(self._cache.collect, self._loader.artifacts_in_use)

    async def delete(self, model: LiveModel, version: int, origin: Origin) -> Outcome:
        """Remove a version from disk and memory; raises as `Store.delete`."""
        async with model.lock:
            return await self._delete(model, version, origin)

    def drop(self, model: LiveModel, version: int) -> None:
        """Remove from memory a version whose folder no longer exists; its running requests finish."""
        self._loader.forget(model, version)
        model.statuses.pop(version, None)
        model.clear_failures([version])
        model.unadopted_manifests.pop(version, None)
        model.unadopted.discard(version)

    async def _delete(self, model: LiveModel, version: int, origin: Origin) -> Outcome:
        outcome = await asyncio.to_thread(self._store.delete, model.name, version, origin)
        self.drop(model, version)
        model.show(outcome.record.state)
        return outcome

    def _schedule_tidy(self, model: LiveModel) -> None:
        self._loader.spawn(self.tidy(model))

    async def _expired(self, model: LiveModel) -> list[int]:
        """Return the versions that retention deletes, oldest first.

        Only if there are any, it reads all pipelines from disk, and leaves out the versions that they pin.
        """
        kept = {*model.config.version_policy.specific, *+model.pinned}
        found = policy.versions_to_delete(model.aliases, model.loadable_versions, self._keep_versions, kept)
        if found:
            pipelines = await asyncio.to_thread(self._store.pipelines)
            pins = {pin for definition in pipelines.values() for pin in definition.pins}
            pinned = {pin.version for pin in pins if pin.name == model.name}
            found = policy.versions_to_delete(
                model.aliases, model.loadable_versions, self._keep_versions, kept | pinned
            )
        return found

    async def _delete_unless_pinned(self, model: LiveModel, version: int) -> None:
        """Delete a version, unless an operation that began meanwhile, such as its promotion, has pinned it.

        A ServerError is logged, not raised.
        """
        try:
            async with model.lock:
                if not model.pinned[version]:
                    await self._delete(model, version, Origin("retention"))
        except ServerError as error:
            fields = log_fields(model=model.name, version=version, code=error.code)
            log.warning("retention could not delete a version: %s", error.message, extra=fields)
