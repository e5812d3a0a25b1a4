"""Turns a model file into a model in memory: parse and compile in child processes, load, warm up."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from lathe.server.backends.base import Backend, LoadedModel, as_packing
from lathe.server.datatypes import NUMPY_OF
from lathe.server.errors import BadRequest, ServerError, Unavailable, Unprocessable
from lathe.server.processes.stage_children import Children
from lathe.server.repository.artifacts import (
    TOKEN_PACKING,
    ArtifactCache,
    BuildOptions,
    artifact_key,
    compiler_digest,
    compiler_digest_at_start,
)
from lathe.server.repository.manifest import MANIFEST
from lathe.server.repository.memory_budget import MemoryBudget, Owner
from lathe.server.repository.model_config import Compilation, Generation
from lathe.server.repository.store import storage_error
from lathe.server.types import Array, TensorSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model in memory, and the folders of compiled code in the cache (`artifacts`) from which it was loaded."""

    artifacts: tuple[Path, ...]
    model: LoadedModel
    seconds: float  # for compiling and loading
    compilation: tuple[Compilation, Generation]  # the options of its configuration


class Builder:
    """Compiles and loads models. Concurrent builds of the same file with the same options compile once."""

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
        self._compiler = compiler_digest_at_start()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def build(
        self,
        model_file: Path,
        digest: str,
        owner: Owner,
        loading: Callable[[], None] = lambda: None,
        packing: int | None = None,
    ) -> BuiltModel:
        """Compile and load a model file, whose sha256 is `digest`, with the configuration of `owner`.

        `packing`: as in `BuildOptions`, if the configuration says nothing of it, and the model runs on the CPU.
        `loading` is called when the compiled code is in the cache. If a cached artifact does not load, the file is
        compiled again. The caller must close the model. Raises ServerError, such as OutOfMemory if the memory budget or
        a device is too small.
        """
        started, compilation = time.monotonic(), owner.config.build
        artifact, model = await self._build(model_file, digest, owner, loading, packing)
        return BuiltModel((artifact,), model, time.monotonic() - started, compilation)

    async def _build(
        self, model_file: Path, digest: str, owner: Owner, loading: Callable[[], None], packing: int | None
    ) -> tuple[Path, LoadedModel]:
        options = owner.config.compile.options(self._options)
        if options.packing is None and options.device == "cpu":
            options = replace(options, packing=packing)
        key = artifact_key(digest, options, self._compiler)
        artifact, compiled_now = await self._artifact(model_file, key, options)
        loading()
        try:
            return artifact, await asyncio.to_thread(self._load, artifact, options.threads, owner)
        except Unprocessable as error:
            if compiled_now:
                raise
            log.warning("a compiled model of the cache does not load, so it is compiled again: %s", error.message)
        await asyncio.to_thread(self._cache.drop, key)
        artifact, _ = await self._artifact(model_file, key, options)
        return artifact, await asyncio.to_thread(self._load, artifact, options.threads, owner)

    async def _artifact(self, model_file: Path, key: str, options: BuildOptions) -> tuple[Path, bool]:
        """Return the artifact's folder, and whether it was compiled now (rather than found in the cache)."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            found = await asyncio.to_thread(self._cache.find, key)
            return (found, False) if found else (await self._compile(model_file, key, options), True)

    async def _compile(self, model_file: Path, key: str, options: BuildOptions) -> Path:
        try:
            work = await asyncio.to_thread(self._cache.begin)
        except OSError as error:
            raise storage_error("compiling", error) from error
        try:
            await self._children.run(
                "parse", model_file, work / "ir", *await asyncio.to_thread(_parse_flags, model_file)
            )
            await self._children.run("compile", work / "ir", work / "artifact", *self._compile_flags(options))
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
        """Raise Unavailable if the sources changed since the start: artifacts of the new sources may not load here."""
        if compiler_digest() != self._compiler:
            raise Unavailable(
                "Lathe's program files have changed since this server started: restart the server, then try again"
            )

    def _compile_flags(self, options: BuildOptions) -> list[str]:
        flags = ["--max-batch", str(options.max_batch), "--precision", options.precision]
        flags += ["--device", options.device]
        flags += ["--device-memory", str(options.device_memory)] if options.device_memory else []
        return [*flags, *_packing_flags(options), "--threads", str(options.threads), "--cache", str(self._cache.shared)]

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


def _packing_flags(options: BuildOptions) -> list[str]:
    if options.packing is None:
        return ["--token-packing", str(TOKEN_PACKING)] if options.device == "cpu" else []
    return ["--packing", str(options.packing)] if options.packing else []


def _parse_flags(model_file: Path) -> list[str]:
    """Return ["--external"], which allows tensors in external files, if the folder holds other files; otherwise []."""
    others = {path.name for path in model_file.parent.iterdir()} - {model_file.name, MANIFEST}
    return ["--external"] if others else []


def warm_up(model: LoadedModel) -> None:
    """Run the model once on zeros, if it packs or all inputs are numeric, with fixed sizes after the first dimension.

    Dynamic dimensions have size 1. A BadRequest is ignored: zeros may be invalid input, for example as a shape.
    """
    if as_packing(model) is not None or all(_is_sized(spec) for spec in model.inputs):
        with suppress(BadRequest):
            model.execute({spec.name: _zeros(spec) for spec in model.inputs})


def _is_sized(spec: TensorSpec) -> bool:
    return spec.datatype != "BYTES" and not spec.any_rank and all(size >= 0 for size in spec.shape[1:])


def _zeros(spec: TensorSpec) -> Array:
    return np.zeros([1 if size < 0 else size for size in spec.shape], NUMPY_OF[spec.datatype])
