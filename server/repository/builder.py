"""From a model file to a model in memory: parse and compile in child processes, load, warm up."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from server.backends.base import Backend, LoadedModel, packing
from server.children import Children
from server.datatypes import NUMPY_OF
from server.errors import BadRequest, ServerError, Unavailable, Unprocessable
from server.repository.artifacts import ArtifactCache, BuildOptions, compiler_at_start, compiler_now, key_of
from server.repository.manifest import MANIFEST
from server.repository.memory import MemoryBudget, Owner
from server.repository.store import storage_error
from server.types import Array, TensorSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """A model in memory, and the artifacts it came from."""

    artifacts: tuple[Path, ...]
    model: LoadedModel
    seconds: float  # that took


class Builder:
    """Makes loaded models. The same file is compiled once, whoever asks how often."""

    def __init__(
        self,
        children: Children,
        cache: ArtifactCache,
        backend: Backend,
        options: BuildOptions,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._children = children
        self._cache = cache
        self._backend = backend
        self._options = options
        self._memory = memory or MemoryBudget()
        self._compiler = compiler_at_start()
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def build(
        self,
        model_file: Path,
        digest: str,
        owner: Owner,
        loading: Callable[[], None] = lambda: None,
    ) -> Built:
        """Bring a model file whose sha256 is ``digest`` into memory, as its ``owner`` is configured.

        ``loading`` is told when it is compiled.
        An artifact of the cache that does not load (another machine's, another release's) is compiled again.
        Raises ServerError; OutOfMemory before anything is loaded.
        """
        started = time.monotonic()
        artifact, model = await self._build(model_file, digest, owner, loading)
        return Built((artifact,), model, time.monotonic() - started)

    async def _build(
        self, model_file: Path, digest: str, owner: Owner, loading: Callable[[], None]
    ) -> tuple[Path, LoadedModel]:
        options = owner.config.compile.options(self._options)
        key = key_of(digest, options, self._compiler)
        artifact, fresh = await self._artifact(model_file, key, options)
        loading()
        try:
            return artifact, await asyncio.to_thread(self._load, artifact, options.threads, owner)
        except Unprocessable as error:
            if fresh:
                raise
            log.warning("a compiled model of the cache does not load, so it is compiled again: %s", error.message)
        await asyncio.to_thread(self._cache.drop, key)
        artifact, _ = await self._artifact(model_file, key, options)
        return artifact, await asyncio.to_thread(self._load, artifact, options.threads, owner)

    async def _artifact(self, model_file: Path, key: str, options: BuildOptions) -> tuple[Path, bool]:
        """Return the artifact, and whether it was compiled just now."""
        async with self._busy.setdefault(key, asyncio.Lock()):
            found = await asyncio.to_thread(self._cache.find, key)
            return (found, False) if found else (await self._make(model_file, key, options), True)

    async def _make(self, model_file: Path, key: str, options: BuildOptions) -> Path:
        try:
            work = await asyncio.to_thread(self._cache.begin)
        except OSError as error:
            raise storage_error("compiling", error) from error
        try:
            await self._children.run("parse", model_file, work / "ir", *await asyncio.to_thread(_reading, model_file))
            await self._children.run("compile", work / "ir", work / "artifact", *self._flags(options))
            await asyncio.to_thread(self._check_compiler)
            return await asyncio.to_thread(self._cache.keep, key, work / "artifact")
        except OSError as error:
            raise storage_error("compiling", error) from error
        except ServerError:
            await asyncio.to_thread(self._check_compiler)
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    def _check_compiler(self) -> None:
        """Refuse what child processes made with other sources than this process runs: it could not load that."""
        if compiler_now() != self._compiler:
            raise Unavailable(
                "Lathe's program files have changed since this server started: restart the server, then try again"
            )

    def _flags(self, options: BuildOptions) -> list[str]:
        flags = ["--max-batch", str(options.max_batch), "--precision", options.precision]
        flags += ["--device", options.device]
        flags += ["--device-memory", str(options.device_memory)] if options.device_memory else []
        packing = ["--packing", str(options.packing)] if options.packing else []
        return [*flags, *packing, "--threads", str(options.threads), "--cache", str(self._cache.shared)]

    def _load(self, artifact: Path, threads: int, owner: Owner) -> LoadedModel:
        claim = self._memory.claim(self._backend.needs(artifact), owner)
        try:
            model = self._backend.load(artifact, threads, claim.release)
        except BaseException:
            claim.release()
            raise
        try:
            warm_up(model)
        except BaseException:
            model.close()
            raise
        return model


def _reading(model_file: Path) -> list[str]:
    """Permit tensors in other files where the version has any: all of them are its own."""
    others = {path.name for path in model_file.parent.iterdir()} - {model_file.name, MANIFEST}
    return ["--external"] if others else []


def warm_up(model: LoadedModel) -> None:
    """Run the model once on zeros, if its inputs say how large they are, or it packs, whatever the length. It may
    refuse these as data: a shape of zeros, say."""
    if packing(model) is not None or all(_is_sized(spec) for spec in model.inputs):
        with suppress(BadRequest):
            model.execute({spec.name: _zeros(spec) for spec in model.inputs})


def _is_sized(spec: TensorSpec) -> bool:
    return spec.datatype != "BYTES" and not spec.any_rank and all(size >= 0 for size in spec.shape[1:])


def _zeros(spec: TensorSpec) -> Array:
    return np.zeros([1 if size < 0 else size for size in spec.shape], NUMPY_OF[spec.datatype])
