"""From ``pipeline.toml`` to a pipeline in memory: find its models, make its steps, check that all of it fits."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from server.errors import ServerError, Unavailable, Unprocessable
from server.pipelines.builtins.base import Made, Request
from server.pipelines.builtins.registry import find
from server.pipelines.definition import BadPipeline, StepDef, read_definition
from server.pipelines.pipeline import BuiltinStage, Face, ModelStage, Pipeline, Stage, reach
from server.pipelines.wiring import Types, attach, in_order, known_types
from server.repository.builder import Builder, Built, warm_up
from server.repository.live import LiveModel, LiveModels
from server.repository.memory import Owner

if TYPE_CHECKING:
    from server.dataplane import Resolver
    from server.scheduling.servable import Servable


class Ensure(Protocol):
    """Brings a version into memory, and returns it once it is there."""

    async def __call__(self, model: LiveModel, version: int) -> Servable: ...


Released: TypeAlias = Callable[[LiveModel], None]  # told of a model that is held no more


@dataclass(slots=True)
class _Parts:
    """What a pipeline has taken hold of so far."""

    owner: Owner  # of the pipeline, and so of the graphs among its steps
    pins: list[tuple[LiveModel, int]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    artifacts: list[Path] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)  # what an alias names stays in memory until all is warm

    def unpin(self, released: Released) -> None:
        pins, self.pins = self.pins, []
        for model, version in pins:
            model.pinned[version] -= 1
            released(model)

    def close(self) -> None:
        for stage in self.stages:
            if isinstance(stage, BuiltinStage):
                stage.model.close()


class PipelineBuilder:
    """Makes pipelines of the models in this process; a version that a pipeline names stays in memory with it."""

    def __init__(self, models: LiveModels, resolver: Resolver, builder: Builder, ensure: Ensure) -> None:
        self._models = models
        self._resolver = resolver
        self._builder = builder
        self._ensure = ensure
        self.released: Released = lambda model: None  # set by who lets go of what is not needed any more

    async def build(self, model: LiveModel, folder: Path, loading: Callable[[], None]) -> Built:
        """Bring the pipeline whose files lie in ``folder`` into memory, its graphs as ``model`` is configured.

        ``loading`` is told when its models and steps are there. Raises NotFound or Unavailable for a model that is not
        there or not loaded, Unprocessable for anything that does not fit.
        """
        started = asyncio.get_running_loop().time()
        parts = _Parts(model)
        try:
            with parts.held:
                pipeline = await self._build(model.name, folder, parts)
                loading()
                await asyncio.to_thread(warm_up, pipeline)
        except BaseException as error:
            parts.unpin(self.released)
            await asyncio.to_thread(parts.close)
            if isinstance(error, BadPipeline):
                raise Unprocessable(str(error)) from error
            raise
        return Built(tuple(parts.artifacts), pipeline, asyncio.get_running_loop().time() - started)

    async def _build(self, name: str, folder: Path, parts: _Parts) -> Pipeline:
        definition = await asyncio.to_thread(read_definition, folder)
        types = known_types(definition)
        for step in in_order(definition):
            try:
                stage = await self._stage(name, step, types, folder, parts)
            except (BadPipeline, ServerError) as error:
                raise _at(step, error) from error
            parts.stages.append(stage)
            attach(step, stage.face, types)
        return Pipeline(
            parts.stages,
            [types[given.name] for given in definition.inputs],
            [types[tensor] for tensor in definition.outputs],
            _on_loop(lambda: parts.unpin(self.released)),
        )

    async def _stage(self, owner: str, step: StepDef, types: Types, folder: Path, parts: _Parts) -> Stage:
        if step.builtin is not None:
            return await self._builtin(step, step.builtin, types, folder, parts)
        found = await self._find(step, parts)
        if owner in {found.ref.name, *reach(found.model)}:
            raise Unprocessable(f"{found.ref} leads back to pipeline {owner!r}")
        return ModelStage(step, owner, self._resolver, Face.of(found.model))

    async def _find(self, step: StepDef, parts: _Parts) -> Servable:
        """Return the model of a step; a version that is named is loaded if need be, and held."""
        if step.pin is None:
            found = self._resolver.resolve(step.model or "", step.selector)
            parts.held.enter_context(self._models.get(found.ref.name).pin(found.ref.version))
            return found
        model = self._models.known(step.pin.name)
        if model.unloaded:
            raise Unavailable(f"model {model.name!r} was unloaded here: load it first")
        model.pinned[step.pin.version] += 1
        parts.pins.append((model, step.pin.version))
        return await self._ensure(model, step.pin.version)

    async def _builtin(self, step: StepDef, name: str, types: Types, folder: Path, parts: _Parts) -> BuiltinStage:
        known = {own: replace(types[tensor], name=own) for own, tensor in step.inputs.items() if tensor in types}
        request = Request(step.options, known, folder)
        made = await asyncio.to_thread(_make, name, request)
        if isinstance(made, bytes):
            built = await self._compile(made, parts.owner)
            parts.artifacts += built.artifacts
            return BuiltinStage(step, built.model, alone=False, inline=True)
        return BuiltinStage(step, made, alone=True, inline=made.inline)

    async def _compile(self, content: bytes, owner: Owner) -> Built:
        """Bring a step that is a graph into memory."""
        with tempfile.TemporaryDirectory(prefix="lathe-step-") as folder:
            file = Path(folder) / "model.onnx"
            file.write_bytes(content)
            return await self._builder.build(file, hashlib.sha256(content).hexdigest(), owner)


def _make(name: str, request: Request) -> Made:
    return find(name)(request)


def _at(step: StepDef, error: BadPipeline | ServerError) -> BadPipeline | ServerError:
    """Return the same error, saying in which step it happened."""
    if isinstance(error, ServerError):
        return type(error)(f"step {step.name!r}: {error.message}", retry_after=error.retry_after)
    return BadPipeline(f"step {step.name!r}: {error}")


def _on_loop(work: Callable[[], None]) -> Callable[[], None]:
    """Return what does the work on this event loop, whichever thread asks for it."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        loop.call_soon_threadsafe(work)

    return ask
