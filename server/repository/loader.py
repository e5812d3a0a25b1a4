"""Loads and unloads versions; each is loaded once at a time, and the versions that answer are not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lathe.server.backends.base import LoadedModel
from lathe.server.errors import Internal, NotFound, ServerError, Unavailable, Unprocessable
from lathe.server.repository.aliases import DamagedDocument
from lathe.server.repository.builder import Builder, BuiltModel
from lathe.server.repository.language_builder import LanguageBuilder
from lathe.server.repository.lifecycle import State, Status
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.manifest import (
    MODEL_FILE,
    CorruptVersion,
    Manifest,
    language_model_path,
    verify_files,
)
from lathe.server.repository.pipeline_builder import PipelineBuilder
from lathe.server.repository.store import Store, storage_error
from lathe.server.telemetry.logs import log_fields
from lathe.server.types import ModelRef

if TYPE_CHECKING:
    from lathe.server.serving.servable import Servable

log = logging.getLogger(__name__)

T = TypeVar("T")


class ServableMaker(Protocol):
    """Makes servables: loaded models with a queue and statistics."""

    def make(self, ref: ModelRef, model: LoadedModel) -> Servable:
        """Return the servable; called on the event loop's thread."""
        ...

    def forget(self, ref: ModelRef) -> None:
        """Drop the metrics of a version that was deleted."""
        ...


class Loader:
    """Loads and retires versions; owns the background tasks."""

    def __init__(
        self,
        store: Store,
        builder: Builder,
        servables: ServableMaker,
        models: LiveModels,
        languages: LanguageBuilder | None = None,
    ) -> None:
        self._store = store
        self._builder = builder
        self._languages = languages or LanguageBuilder()
        self._servables = servables
        self.pipelines = PipelineBuilder(models, models.registry, builder, self.ensure)
        self._artifacts: dict[ModelRef, tuple[Path, ...]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def artifacts_in_use(self) -> set[Path]:
        """The compiled artifacts of the versions in memory."""
        return {path for paths in self._artifacts.values() for path in paths}

    async def ensure(self, model: LiveModel, version: int) -> Servable:
        """Load a version if it is not in memory, and return it; raises NotFound, or the ServerError of loading.

        Raises Unavailable if a call has unloaded the model, even after the caller has looked. Concurrent calls load the
        version once. Loading continues if the caller is cancelled.
        """
        if (servable := model.loaded.get(version)) is not None:
            return servable
        if version not in model.loading:
            if model.is_unloaded:
                raise Unavailable(f"model {model.name!r} was unloaded here: load it first")
            model.loading[version] = self.spawn(self._load(model, version))
        return await asyncio.shield(model.loading[version])

    async def prepare(self, model: LiveModel, folder: Path, digest: str) -> BuiltModel:
        """Compile and load the files of an upload, which is not a version yet; raises ServerError.

        The caller must close the model unless it becomes a version (`enter`).
        """
        try:
            return await self._build(model, folder, digest)
        except NotFound as error:  # a model that the pipeline uses
            raise Unprocessable(error.message) from error

    def enter(self, model: LiveModel, version: int, built: BuiltModel) -> Servable:
        """Add a loaded model as `version`, and return its servable; requests see it after the next `LiveModel.show`."""
        servable = self._make_servable(model, version, built)
        model.failures.pop(version, None)
        model.advance(version, State.READY)
        return servable

    def _make_servable(self, model: LiveModel, version: int, built: BuiltModel) -> Servable:
        ref = ModelRef(model.name, version)
        servable = model.loaded[version] = self._servables.make(ref, built.model)
        model.built_with[version] = built.compilation, model.config.batches
        model.rebuild_failures.pop(version, None)
        if not model.config.batches:
            servable.signature = servable.signature.without_batching()
        servable.stats.load_seconds = built.seconds
        model.apply_config(servable)
        self._artifacts[ref] = built.artifacts
        fields = log_fields(model=model.name, version=version, seconds=round(built.seconds, 3))
        log.info("%s: version %d is in memory after %.1f s", model.name, version, built.seconds, extra=fields)
        return servable

    async def rebuild(self, model: LiveModel, version: int) -> None:
        """Build a loaded version again with the present configuration, and switch to the new build.

        Does nothing if the version is not in memory. Raises ServerError, CorruptVersion, DamagedDocument or OSError;
        then the old build continues to answer.
        """
        before = model.loaded.get(version)
        if before is None:
            return
        folder = await asyncio.to_thread(self._store.folder, model.name, version)
        manifest = await asyncio.to_thread(self._verified_manifest, model, version, folder)
        built = await self._build(model, folder, manifest.digest)
        if model.loaded.get(version) is not before:  # unloaded or reloaded meanwhile
            await asyncio.to_thread(built.model.close)
            return
        self._make_servable(model, version, built)
        model.show(model.aliases)
        self.spawn(before.retire())

    async def add_loaded_or_await(self, model: LiveModel, version: int, built: BuiltModel) -> bool:
        """Add a loaded model as `version` and return True; return False if a sync found the version on disk first.

        Then this waits until the sync has loaded the version or has failed. The sync records its failure; it is not
        raised here.
        """
        if version not in model.loaded and version not in model.loading:
            self.enter(model, version, built)
            return True
        with contextlib.suppress(ServerError):
            await self.ensure(model, version)
        return False

    def let_go(self, model: LiveModel, version: int, *, at_once: bool = False) -> asyncio.Task[None]:
        """Unload a version: no new requests; the task ends when the running ones have finished and its memory is free.

        `at_once`: executions that may run for ever are interrupted now, otherwise after some seconds.
        """
        servable = model.loaded.pop(version)
        del model.built_with[version]
        model.rebuild_failures.pop(version, None)
        model.advance(version, State.DRAINING)
        model.show(model.aliases)
        return self.spawn(self._retire(model, version, servable, at_once))

    def forget(self, model: LiveModel, version: int) -> None:
        """Unload a version whose folder is gone, and drop its metrics."""
        if version in model.loaded:
            self.let_go(model, version)
        self._servables.forget(ModelRef(model.name, version))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a background task, which runs to its end even if the caller is cancelled; only `stop` may cancel it.

        An exception of a task that no caller awaits is dropped.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which runs to its end even if the caller is cancelled."""
        task: asyncio.Task[T] = self.spawn(work)
        return await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait until no background task is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self, patience: float) -> None:
        """Wait at most `patience` seconds for the background tasks, then cancel those left, and wait for their end."""
        try:
            await asyncio.wait_for(self.settle(), patience)
        except TimeoutError:
            for task in self._tasks:
                task.cancel()
            await self.settle()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: an unawaited task may fail without a warning

    async def _load(self, model: LiveModel, version: int) -> Servable:
        try:
            folder = await asyncio.to_thread(self._store.folder, model.name, version)
            return await self._load_folder(model, version, folder)
        finally:
            model.loading.pop(version, None)

    async def _load_folder(self, model: LiveModel, version: int, folder: Path) -> Servable:
        model.advance(version, State.COMPILING)
        try:
            manifest = await asyncio.to_thread(self._verified_manifest, model, version, folder)
            built = await self._build_version(model, version, folder, manifest.digest)
        except Exception as error:  # any failure: the version that answers now must not be affected
            failure = as_server_error(error)
            fields = log_fields(model=model.name, version=version, code=failure.code)
            log.warning("%s:%d cannot be loaded: %s", model.name, version, failure.message, extra=fields)
            if version in model.statuses:
                model.fail(version, failure)
                model.show(model.aliases)
            raise failure from error
        if version not in model.statuses:
            await asyncio.to_thread(built.model.close)
            raise NotFound(f"version {version} of model {model.name!r} was deleted while it was loaded")
        servable = self.enter(model, version, built)
        if model.is_unloaded:
            self.let_go(model, version)
            raise Unavailable(f"model {model.name!r} was unloaded while version {version} was loaded")
        model.show(model.aliases)
        return servable

    async def _build_version(self, model: LiveModel, version: int, folder: Path, digest: str) -> BuiltModel:
        try:
            return await self._build(model, folder, digest, lambda: self._on_loading(model, version))
        except NotFound as error:  # a model that the pipeline uses; it may appear later, so this is retried
            raise Unavailable(error.message) from error

    async def _build(
        self, model: LiveModel, folder: Path, digest: str, loading: Callable[[], None] = lambda: None
    ) -> BuiltModel:
        if (folder / MODEL_FILE).exists():
            return await self._builder.build(folder / MODEL_FILE, digest, model, loading)
        if (path := language_model_path(folder)) is not None:
            return await self._languages.build(path, model, loading)
        return await self.pipelines.build(model, folder, loading)

    def _on_loading(self, model: LiveModel, version: int) -> None:
        if version in model.statuses:  # otherwise it was deleted meanwhile
            model.advance(version, State.LOADING)

    def _verified_manifest(self, model: LiveModel, version: int, folder: Path) -> Manifest:
        manifest = self._store.manifest(model.name, version) or model.unadopted_manifests.get(version)
        if manifest is None:
            raise NotFound(f"version {version} of model {model.name!r} has not been taken into the repository yet")
        verify_files(folder, manifest)
        return manifest

    async def _retire(self, model: LiveModel, version: int, servable: Servable, at_once: bool) -> None:
        await (servable.retire(0.0) if at_once else servable.retire())
        if version not in model.loaded:  # otherwise it was loaded again meanwhile
            self._artifacts.pop(servable.ref, None)
        if model.statuses.get(version) == Status(State.DRAINING):
            model.advance(version, State.UNLOADED)
            if model.registry.find(model.name) is not None:
                model.show(model.aliases)


def as_server_error(error: Exception) -> ServerError:
    """Return the error for the client after an exception while loading; an unexpected exception is logged."""
    if isinstance(error, ServerError):
        return error
    if isinstance(error, CorruptVersion | DamagedDocument):
        return Unprocessable(str(error))
    if isinstance(error, OSError):
        return storage_error("loading", error)
    log.error("unexpected error while loading", exc_info=error)
    return Internal("loading failed; see the server's log")
