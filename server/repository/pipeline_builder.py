"""Builds a pipeline from `pipeline.toml`: finds its models, makes its steps, checks names and types."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lathe.server.errors import ServerError, Unavailable, Unprocessable
from lathe.server.pipelines.builtins.base import StepModel, StepRequest
from lathe.server.pipelines.builtins.registry import find_maker
from lathe.server.pipelines.definition import BadPipeline, StepDef, read_definition
from lathe.server.pipelines.pipeline import BuiltinStage, ModelInterface, ModelStage, Pipeline, Stage, reachable_models
from lathe.server.pipelines.type_check import Types, check_step, declared_types, topological_order
from lathe.server.repository.artifacts import TOKEN_PACKING
from lathe.server.repository.builder import Builder, BuiltModel, warm_up
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.memory_budget import Owner

if TYPE_CHECKING:
    from lathe.server.serving.dataplane import Resolver
    from lathe.server.serving.servable import Servable


class EnsureLoaded(Protocol):
    """Loads a version if it is not in memory, and returns it."""

    async def __call__(self, model: LiveModel, version: int) -> Servable: ...


OnReleased: TypeAlias = Callable[[LiveModel], None]  # called with a model whose version a pipeline no longer pins


@dataclass(slots=True)
class _Parts:
    """The resources that a pipeline has acquired while it is built."""

    owner: Owner  # its configuration applies to steps that are compiled graphs
    pins: list[tuple[LiveModel, int]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    artifacts: list[Path] = field(default_factory=list)
    temporary_pins: ExitStack = field(default_factory=ExitStack)  # pins of versions found by alias, until the warm-up

    def unpin(self, released: OnReleased) -> None:
        pins, self.pins = self.pins, []
        for model, version in pins:
            model.pinned[version] -= 1
            released(model)

    def close(self) -> None:
        for stage in self.stages:
            if isinstance(stage, BuiltinStage):
                stage.model.close()


class PipelineBuilder:
    """Builds pipelines from models of this process; a pipeline pins the versions that it names by number."""

    def __init__(self, models: LiveModels, resolver: Resolver, builder: Builder, ensure: EnsureLoaded) -> None:
        self._models = models
        self._resolver = resolver
        self._builder = builder
        self._ensure = ensure
        self.released: OnReleased = lambda model: None  # set by `Housekeeping`

    async def build(self, model: LiveModel, folder: Path, loading: Callable[[], None]) -> BuiltModel:
        """Build the pipeline in `folder`; the configuration of `model` applies to the steps that are graphs.

        `loading` is called when its models and steps are in memory, before the warm-up. The caller must close the
        pipeline, which unpins the versions. Raises NotFound or Unavailable for a model that does not exist or is not
        loaded, the error of loading one, Unprocessable for an invalid definition, and OSError.
        """
        started, compilation = asyncio.get_running_loop().time(), model.config.build
        parts = _Parts(model)
        try:
            with parts.temporary_pins:
                pipeline = await self._build(model.name, folder, parts)
                loading()
                await asyncio.to_thread(warm_up, pipeline)
        except BaseException as error:
            parts.unpin(self.released)
            await asyncio.to_thread(parts.close)
            if isinstance(error, BadPipeline):
                raise Unprocessable(str(error)) from error
            raise
        seconds = asyncio.get_running_loop().time() - started
        return BuiltModel(tuple(parts.artifacts), pipeline, seconds, compilation)

    async def _build(self, name: str, folder: Path, parts: _Parts) -> Pipeline:
        definition = await asyncio.to_thread(read_definition, folder)
        types = declared_types(definition)
        for step in topological_order(definition):
            try:
                stage = await self._stage(name, step, types, folder, parts)
            except (BadPipeline, ServerError) as error:
                raise _with_step(step, error) from error
            parts.stages.append(stage)
            check_step(step, stage.interface, types)
        return Pipeline(
            parts.stages,
            [types[given.name] for given in definition.inputs],
            [types[tensor] for tensor in definition.outputs],
            _call_on_loop(lambda: parts.unpin(self.released)),
        )

    async def _stage(self, owner: str, step: StepDef, types: Types, folder: Path, parts: _Parts) -> Stage:
        if step.builtin is not None:
            return await self._builtin(step, step.builtin, types, folder, parts)
        found = await self._find(step, parts)
        if owner in {found.ref.name, *reachable_models(found.model)}:
            raise Unprocessable(f"{found.ref} leads back to pipeline {owner!r}")
        return ModelStage(step, owner, self._resolver, ModelInterface.of(found.model))

    async def _find(self, step: StepDef, parts: _Parts) -> Servable:
        """Return the servable of a step's model: a version named by number is loaded if necessary, and pinned.

        The version of an alias is pinned until the pipeline is built. Raises NotFound, Unavailable, or the error of
        loading.
        """
        if step.pin is None:
            found = self._resolver.resolve(step.model or "", step.selector)
            parts.temporary_pins.enter_context(self._models.get(found.ref.name).pin(found.ref.version))
            return found
        model = self._models.known(step.pin.name)
        if model.is_unloaded:
            raise Unavailable(f"model {model.name!r} was unloaded here: load it first")
        model.pinned[step.pin.version] += 1
        parts.pins.append((model, step.pin.version))
        return await self._ensure(model, step.pin.version)

    async def _builtin(self, step: StepDef, name: str, types: Types, folder: Path, parts: _Parts) -> BuiltinStage:
        known = {own: replace(types[tensor], name=own) for own, tensor in step.inputs.items() if tensor in types}
        request = StepRequest(step.options, known, folder)
        made = await asyncio.to_thread(_make, name, request)
        if isinstance(made, bytes):
            built = await self._compile(made, parts.owner)
            parts.artifacts += built.artifacts
            return BuiltinStage(step, built.model, alone=False, inline=True)
        return BuiltinStage(step, made, alone=True, inline=made.inline)

    async def _compile(self, content: bytes, owner: Owner) -> BuiltModel:
        """Compile and load a step that is an ONNX graph."""
        with tempfile.TemporaryDirectory(prefix="lathe-step-") as folder:
            file = Path(folder) / "model.onnx"
            file.write_bytes(content)
            return await self._builder.build(file, hashlib.sha256(content).hexdigest(), owner, packing=TOKEN_PACKING)


def _make(name: str, request: StepRequest) -> StepModel:
    return find_maker(name)(request)


def _with_step(step: StepDef, error: BadPipeline | ServerError) -> BadPipeline | ServerError:
    """Return the same error with the step's name in its message."""
    if isinstance(error, ServerError):
        return type(error)(f"step {step.name!r}: {error.message}", retry_after=error.retry_after)
    return BadPipeline(f"step {step.name!r}: {error}")


def _call_on_loop(work: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `work` on this event loop; callable from any thread."""
    loop = asyncio.get_running_loop()

    def schedule() -> None:
        loop.call_soon_threadsafe(work)

    return schedule
