"""Brings versions into memory and lets them go, one at a time each, without touching what answers meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from server.backends.base import LoadedModel
from server.errors import Internal, NotFound, ServerError, Unavailable, Unprocessable
from server.repository.aliases import DamagedDocument
from server.repository.builder import Builder, Built
from server.repository.lifecycle import State, Status
from server.repository.live import LiveModel, LiveModels
from server.repository.manifest import MODEL_FILE, CorruptVersion, Manifest, verify_files
from server.repository.pipelines import PipelineBuilder
from server.repository.store import Store, storage_error
from server.telemetry.logs import about
from server.types import ModelRef

if TYPE_CHECKING:
    from server.scheduling.servable import Servable

log = logging.getLogger(__name__)

T = TypeVar("T")


class ServableMaker(Protocol):
    """Wraps a loaded model for the data path."""

    def make(self, ref: ModelRef, model: LoadedModel) -> Servable:
        """Return the servable; called on the event loop's thread."""
        ...

    def forget(self, ref: ModelRef) -> None:
        """Drop what is remembered of a version that is gone for good."""
        ...


class Loader:
    """Loads and retires versions; keeps the background tasks of both."""

    def __init__(self, store: Store, builder: Builder, servables: ServableMaker, models: LiveModels) -> None:
        self._store = store
        self._builder = builder
        self._servables = servables
        self.pipelines = PipelineBuilder(models, models.registry, builder, self.ensure)
        self._artifacts: dict[ModelRef, tuple[Path, ...]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def artifacts_in_use(self) -> set[Path]:
        """The artifacts of what is in memory."""
        return {path for paths in self._artifacts.values() for path in paths}

    async def ensure(self, model: LiveModel, version: int) -> Servable:
        """Return a version once it is in memory; raises NotFound, or the ServerError that says why it cannot be."""
        if (servable := model.loaded.get(version)) is not None:
            return servable
        if version not in model.loading:
            model.loading[version] = self.spawn(self._load(model, version))
        return await asyncio.shield(model.loading[version])

    async def prepare(self, model: LiveModel, folder: Path, digest: str) -> Built:
        """Bring files into memory that are no version yet."""
        try:
            return await self._build(model, folder, digest)
        except NotFound as error:  # a model that a pipeline names
            raise Unprocessable(error.message) from error

    def enter(self, model: LiveModel, version: int, built: Built) -> Servable:
        """Make a loaded model answer by its number (from the next :meth:`LiveModel.show` on)."""
        servable = self._take(model, version, built)
        model.failures.pop(version, None)
        model.advance(version, State.READY)
        return servable

    def _take(self, model: LiveModel, version: int, built: Built) -> Servable:
        ref = ModelRef(model.name, version)
        servable = model.loaded[version] = self._servables.make(ref, built.model)
        if not model.config.batches:
            servable.signature = servable.signature.unbatched()
        servable.stats.load_seconds = built.seconds
        model.adjust(servable)
        self._artifacts[ref] = built.artifacts
        fields = about(model=model.name, version=version, seconds=round(built.seconds, 3))
        log.info("%s: version %d is in memory after %.1f s", model.name, version, built.seconds, extra=fields)
        return servable

    async def rebuild(self, model: LiveModel, version: int) -> None:
        """Bring a version that is in memory there once more, as its configuration now says, and switch to that.

        Raises ServerError; then what was there goes on answering.
        """
        before = model.loaded[version]
        folder = await asyncio.to_thread(self._store.folder, model.name, version)
        manifest = await asyncio.to_thread(self._verified, model, version, folder)
        built = await self._build(model, folder, manifest.digest)
        if model.loaded.get(version) is not before:  # let go, or loaded anew, meanwhile
            await asyncio.to_thread(built.model.close)
            return
        self._take(model, version, built)
        model.show(model.aliases)
        self.spawn(before.retire())

    async def enter_or_await(self, model: LiveModel, version: int, built: Built) -> bool:
        """Make a loaded model answer, and say so; False if another look at the disk saw the version first and has it in
        memory, or is about to: that one notes it if it cannot. What became of an earlier look is of no interest.
        """
        if version not in model.loaded and version not in model.loading:
            self.enter(model, version, built)
            return True
        with contextlib.suppress(ServerError):
            await self.ensure(model, version)
        return False

    def let_go(self, model: LiveModel, version: int, *, at_once: bool = False) -> asyncio.Task[None]:
        """Take a version out of what answers; its last requests finish, then its memory goes: the end of the task.

        ``at_once``: what may not end is broken off; its time is over already."""
        servable = model.loaded.pop(version)
        model.advance(version, State.DRAINING)
        model.show(model.aliases)
        return self.spawn(self._retire(model, version, servable, at_once))

    def forget(self, model: LiveModel, version: int) -> None:
        """Let go of a version whose folder is gone, and of what was counted about it."""
        if version in model.loaded:
            self.let_go(model, version)
        self._servables.forget(ModelRef(model.name, version))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something to its end whatever becomes of the caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something whole, even if the caller leaves meanwhile."""
        task: asyncio.Task[T] = self.spawn(work)
        return await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self, patience: float) -> None:
        """Give what is under way ``patience`` seconds, then break it off."""
        try:
            await asyncio.wait_for(self.settle(), patience)
        except TimeoutError:
            for task in self._tasks:
                task.cancel()
            await self.settle()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits it gets it; nobody may, and that is no fault

    async def _load(self, model: LiveModel, version: int) -> Servable:
        try:
            folder = await asyncio.to_thread(self._store.folder, model.name, version)
            return await self._load_folder(model, version, folder)
        finally:
            model.loading.pop(version, None)

    async def _load_folder(self, model: LiveModel, version: int, folder: Path) -> Servable:
        model.advance(version, State.COMPILING)
        try:
            manifest = await asyncio.to_thread(self._verified, model, version, folder)
            built = await self._build_version(model, version, folder, manifest.digest)
        except Exception as error:  # whatever it is, the version that answers now goes on
            failure = as_server_error(error)
            fields = about(model=model.name, version=version, code=failure.code)
            log.warning("%s:%d cannot be loaded: %s", model.name, version, failure.message, extra=fields)
            if version in model.statuses:
                model.fail(version, failure)
                model.show(model.aliases)
            raise failure from error
        if version not in model.statuses:
            await asyncio.to_thread(built.model.close)
            raise NotFound(f"version {version} of model {model.name!r} was deleted while it was loaded")
        servable = self.enter(model, version, built)
        if model.unloaded:
            self.let_go(model, version)
            raise Unavailable(f"model {model.name!r} was unloaded while version {version} was loaded")
        model.show(model.aliases)
        return servable

    async def _build_version(self, model: LiveModel, version: int, folder: Path, digest: str) -> Built:
        try:
            return await self._build(model, folder, digest, lambda: self._is_loading(model, version))
        except NotFound as error:  # a model that a pipeline names; it may come
            raise Unavailable(error.message) from error

    async def _build(
        self, model: LiveModel, folder: Path, digest: str, loading: Callable[[], None] = lambda: None
    ) -> Built:
        if (folder / MODEL_FILE).exists():
            return await self._builder.build(folder / MODEL_FILE, digest, model, loading)
        return await self.pipelines.build(model, folder, loading)

    def _is_loading(self, model: LiveModel, version: int) -> None:
        if version in model.statuses:  # else deleted meanwhile
            model.advance(version, State.LOADING)

    def _verified(self, model: LiveModel, version: int, folder: Path) -> Manifest:
        manifest = self._store.manifest(model.name, version) or model.guests.get(version)
        if manifest is None:
            raise NotFound(f"version {version} of model {model.name!r} has not been taken into the repository yet")
        verify_files(folder, manifest)
        return manifest

    async def _retire(self, model: LiveModel, version: int, servable: Servable, at_once: bool) -> None:
        await (servable.retire(0.0) if at_once else servable.retire())
        if version not in model.loaded:  # else loaded again meanwhile
            self._artifacts.pop(servable.ref, None)
        if model.statuses.get(version) == Status(State.DRAINING):
            model.advance(version, State.UNLOADED)
            if model.registry.find(model.name) is not None:
                model.show(model.aliases)


def as_server_error(error: Exception) -> ServerError:
    """Return what a caller is told of an error met while loading."""
    if isinstance(error, ServerError):
        return error
    if isinstance(error, CorruptVersion | DamagedDocument):
        return Unprocessable(str(error))
    if isinstance(error, OSError):
        return storage_error("loading", error)
    log.error("unforeseen error while loading", exc_info=error)
    return Internal("loading failed; the server's log says more")
