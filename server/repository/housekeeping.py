"""Lets go of what is not needed: memory, old versions, cached artifacts."""

from __future__ import annotations

import asyncio
import logging

from server.errors import ServerError
from server.repository import policy
from server.repository.artifacts import ArtifactCache
from server.repository.live import LiveModel
from server.repository.loader import Loader
from server.repository.store import Origin, Outcome, Store
from server.telemetry.logs import about

log = logging.getLogger(__name__)


class Housekeeping:
    """What happens after a change, and on request."""

    def __init__(self, store: Store, loader: Loader, cache: ArtifactCache, keep_versions: int) -> None:
        self._store = store
        self._loader = loader
        self._cache = cache
        self._keep_versions = keep_versions
        loader.pipelines.released = self._tidy_soon

    async def tidy(self, model: LiveModel) -> None:
        """Let go of what is not needed in memory, delete what retention does not keep, shrink the cache."""
        keep = {
            *policy.wanted(model.aliases, model.candidates, model.chosen),
            *model.answering().values(),
            *+model.pinned,
        }
        for version in [version for version in model.loaded if version not in keep]:
            self._loader.let_go(model, version)
        if self._store.read_only is None:
            for version in await self._collectable(model):
                await self._collect(model, version)
        await asyncio.to_thread(self._cache.collect, self._loader.artifacts_in_use)

    async def delete(self, model: LiveModel, version: int, origin: Origin) -> Outcome:
        """Remove a version that no alias names; raises NotFound, Conflict."""
        async with model.lock:
            return await self._delete(model, version, origin)

    def drop(self, model: LiveModel, version: int) -> None:
        """Forget a version whose folder is gone; its last requests finish."""
        self._loader.forget(model, version)
        model.statuses.pop(version, None)
        model.failures.pop(version, None)
        model.guests.pop(version, None)
        model.untaken.discard(version)

    async def _delete(self, model: LiveModel, version: int, origin: Origin) -> Outcome:
        outcome = await asyncio.to_thread(self._store.delete, model.name, version, origin)
        self.drop(model, version)
        model.show(outcome.record.state)
        return outcome

    def _tidy_soon(self, model: LiveModel) -> None:
        self._loader.spawn(self.tidy(model))

    async def _collectable(self, model: LiveModel) -> list[int]:
        """Return what retention deletes; pipelines are looked up only if that is anything."""
        kept = {*model.config.version_policy.specific, *+model.pinned}
        found = policy.collectable(model.aliases, model.candidates, self._keep_versions, kept)
        if found:
            pipelines = await asyncio.to_thread(self._store.pipelines)
            pins = {pin for definition in pipelines.values() for pin in definition.pins}
            pinned = {pin.version for pin in pins if pin.name == model.name}
            found = policy.collectable(model.aliases, model.candidates, self._keep_versions, kept | pinned)
        return found

    async def _collect(self, model: LiveModel, version: int) -> None:
        """Delete a version, unless an operation that began meanwhile, such as its promotion, needs it."""
        try:
            async with model.lock:
                if not model.pinned[version]:
                    await self._delete(model, version, Origin("retention"))
        except ServerError as error:
            fields = about(model=model.name, version=version, code=error.code)
            log.warning("not needed any more, but it stays: %s", error.message, extra=fields)
