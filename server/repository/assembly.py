"""Builds the control side of one server process from its settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.runtime.host.cpus import available_cpus
from lathe.server.backends.base import Backend
from lathe.server.processes.stage_children import Children, Limits
from lathe.server.repository.artifacts import ArtifactCache, BuildOptions
from lathe.server.repository.builder import Builder
from lathe.server.repository.disk_space import model_space
from lathe.server.repository.fs import Fs
from lathe.server.repository.housekeeping import Housekeeping
from lathe.server.repository.language_builder import LanguageBuilder
from lathe.server.repository.live_models import LiveModels
from lathe.server.repository.loader import Loader, ServableMaker
from lathe.server.repository.memory_budget import MemoryBudget
from lathe.server.repository.readiness import Readiness
from lathe.server.repository.registry import Registry
from lathe.server.repository.rollout import Rollout, UploadLimits
from lathe.server.repository.store import Store
from lathe.server.repository.watcher import Watcher
from lathe.server.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The objects of the control side that the server's other parts use."""

    rollout: Rollout
    store: Store
    watcher: Watcher
    cache: ArtifactCache
    memory: MemoryBudget
    readiness: Readiness
    children: Children

    @asynccontextmanager
    async def running(self, loaded: Callable[[], None]) -> AsyncIterator[None]:
        """A context manager that recovers the repository when it is entered, and unloads all models when it is left.

        Inside, a background task loads the models, calls `loaded`, and watches the repository; another one advances
        canaries. So a server whose models still compile is alive and can be stopped. Entering raises as `Store.open`.
        """
        await self.rollout.open()
        await asyncio.to_thread(self.cache.open)
        tasks = [asyncio.create_task(self._load_and_watch(loaded)), asyncio.create_task(self.rollout.schedules.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.rollout.stop()

    async def _load_and_watch(self, loaded: Callable[[], None]) -> None:
        try:
            began = time.monotonic()
            async with self.children.at_normal_priority():
                await self.watcher.start()
            self.readiness.begin()
            loaded()
            models = self.rollout.catalog.models()
            ready, seconds = sum(model.ready for model in models), time.monotonic() - began
            log.info("ready: %d of %d models answer, after %.1f s", ready, len(models), seconds)
            await self.watcher.run()
        except Exception:
            log.exception("the model repository is no longer watched")


def build_control_plane(
    settings: Settings,
    registry: Registry,
    backend: Backend,
    servables: ServableMaker,
    children: Children | None = None,
    fs: Fs | None = None,
) -> ControlPlane:
    """Build the repository's objects; tests pass test doubles as `children` and `fs`."""
    if settings.operators:
        from lathe.core.compiler.custom_operators import load_operators

        load_operators(settings.operators)
    store = Store(settings.model_repo, fs, max_staging=settings.max_staging, space=model_space(settings))
    cache = ArtifactCache(settings.cache_folder, settings.max_cache)
    limits = Limits(settings.child_timeout, settings.child_memory, settings.child_processes)
    threads = settings.threads or available_cpus()
    options = BuildOptions(settings.max_batch, settings.precision, threads, settings.device)
    memory = MemoryBudget(settings.max_memory, settings.queue_bytes, settings.workers)
    children = children or Children(limits)
    builder = Builder(children, cache, backend, options, memory)
    models = LiveModels(registry)
    languages = LanguageBuilder(memory, GeneratorOptions(settings.generation_cache, threads))
    loader = Loader(store, builder, servables, models, languages)
    housekeeping = Housekeeping(store, loader, cache, settings.keep_versions)
    rollout = Rollout(store, models, loader, housekeeping, UploadLimits(settings.max_upload, settings.auto_promote))
    watcher = Watcher(store, rollout, settings.poll_interval, settings.settle_time)
    return ControlPlane(rollout, store, watcher, cache, memory, Readiness(models), children)
