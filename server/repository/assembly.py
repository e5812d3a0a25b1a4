"""Builds the control side of one server process from its settings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.runtime.cpus import available_cpus
from server.backends.base import Backend
from server.children import Children, Limits
from server.repository.artifacts import ArtifactCache, BuildOptions
from server.repository.builder import Builder
from server.repository.fs import Fs
from server.repository.housekeeping import Housekeeping
from server.repository.live import LiveModels
from server.repository.loader import Loader, ServableMaker
from server.repository.registry import Registry
from server.repository.rollout import Rollout, UploadLimits
from server.repository.store import Store
from server.repository.watcher import Watcher
from server.settings import Settings


@dataclass(frozen=True, slots=True)
class Control:
    """The objects that others need."""

    rollout: Rollout
    watcher: Watcher
    cache: ArtifactCache

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Recover, load what is live, watch the repository until left; then let everything go."""
        await self.rollout.open()
        await asyncio.to_thread(self.cache.open)
        await self.watcher.start()
        watching = asyncio.create_task(self.watcher.run())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await self.rollout.stop()


def build_control(
    settings: Settings,
    registry: Registry,
    backend: Backend,
    servables: ServableMaker,
    children: Children | None = None,
    fs: Fs | None = None,
) -> Control:
    """Wire the repository's objects; ``children`` and ``fs`` are for tests that put doubles in their place."""
    store = Store(settings.model_repo, fs)
    cache = ArtifactCache(settings.cache_folder, settings.max_cache)
    limits = Limits(settings.child_timeout, settings.child_memory, settings.child_processes)
    options = BuildOptions(settings.max_batch, settings.precision, settings.threads or available_cpus())
    builder = Builder(children or Children(limits), cache, backend, options)
    loader = Loader(store, builder, servables)
    models = LiveModels(registry)
    housekeeping = Housekeeping(store, loader, cache, settings.keep_versions)
    rollout = Rollout(store, models, loader, housekeeping, UploadLimits(settings.max_upload, settings.auto_promote))
    return Control(rollout, Watcher(store, rollout, settings.poll_interval, settings.settle_time), cache)
