"""A loaded pipeline: its steps with what runs them. To the data path it is a model like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from server.backends.base import LoadedModel, devices, lost
from server.errors import ServerError, Unavailable
from server.pipelines.definition import StepDef
from server.pipelines.wiring import fits
from server.types import ModelRef, Tensors, TensorSpec

if TYPE_CHECKING:
    from server.dataplane import Resolver
    from server.scheduling.servable import Servable

PLATFORM = "lathe_pipeline"


@dataclass(frozen=True, slots=True)
class Face:
    """What a pipeline knows of a step's model, without holding on to the model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int
    batchable: bool
    batch_reason: str

    @classmethod
    def of(cls, model: LoadedModel) -> Face:
        """Read a model's."""
        return cls(model.inputs, model.outputs, model.max_batch, model.batchable, model.batch_reason)


class BuiltinStage:
    """A step that belongs to the pipeline: its model is loaded and closed with it.

    ``alone``: requests are executed one by one even where several were taken from the queue together; ``inline``: short
    executions may run on the event loop's thread.
    """

    def __init__(self, step: StepDef, model: LoadedModel, *, alone: bool, inline: bool) -> None:
        self.step = step
        self.model = model
        self.face = Face.of(model)
        self.alone = alone
        self.inline = inline


class ModelStage:
    """A step that is a model of the repository: one version of it, or the one that an alias names at the time."""

    def __init__(self, step: StepDef, owner: str, resolver: Resolver, face: Face) -> None:
        """``owner``: the pipeline's name; ``face``: what the pipeline was checked against."""
        assert step.model is not None
        self.step = step
        self.face = face
        self.name = step.model
        self._owner = owner
        self.resolver = resolver
        self._fitting: WeakSet[Servable] = WeakSet()

    def servable(self) -> Servable:
        """Return what answers now; raises ServerError where nothing does, or where it does not fit any more."""
        found = self.resolver.route(self.name, self.step.selector)
        if found not in self._fitting:
            self._check(found)
            self._fitting.add(found)
        return found

    def _check(self, found: Servable) -> None:
        if not _serves_as(found.model, self.face):
            raise Unavailable(f"{found.ref} takes or gives other tensors than when the pipeline was loaded")
        if self._owner in reach(found.model):
            raise Unavailable(f"{found.ref} leads back to pipeline {self._owner!r}")


Stage = BuiltinStage | ModelStage


class Pipeline:
    """The steps in order, and the types of what goes in and comes out."""

    platform = PLATFORM

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """``release`` is called when the pipeline is closed, on any thread."""
        self.stages = tuple(stages)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._release = release
        self.max_batch = min(stage.face.max_batch for stage in self.stages)
        mixing = [stage for stage in self.stages if not stage.face.batchable]
        self.batchable = not mixing
        self.batch_reason = (
            f"step {mixing[0].step.name!r}: {mixing[0].face.batch_reason}" if mixing else "every step keeps rows apart"
        )

    @property
    def memory_bytes(self) -> int:
        """What its own steps take; models are counted where they are served."""
        return sum(stage.model.memory_bytes for stage in self._own)

    @property
    def devices(self) -> tuple[str, ...]:
        """What runs its own steps, as for its memory."""
        return tuple(dict.fromkeys(name for stage in self._own for name in devices(stage.model)))

    @property
    def lost(self) -> str:
        """Why one of its own steps cannot run any more."""
        return next(filter(None, (lost(stage.model) for stage in self._own)), "")

    @property
    def _own(self) -> list[BuiltinStage]:
        return [stage for stage in self.stages if isinstance(stage, BuiltinStage)]

    @property
    def pins(self) -> frozenset[ModelRef]:
        """The versions it needs as long as it exists."""
        return frozenset(stage.step.pin for stage in self.stages if stage.step.pin is not None)

    def execute(self, inputs: Tensors) -> Tensors:
        """Run the steps one after the other on this thread, past all queues: to warm up."""
        tensors = dict(inputs)
        for stage in self.stages:
            step = stage.step
            model = stage.model if isinstance(stage, BuiltinStage) else stage.servable().model
            made = model.execute({name: tensors[tensor] for name, tensor in step.inputs.items()})
            tensors |= {tensor: made[name] for name, tensor in step.outputs.items()}
        return {spec.name: tensors[spec.name] for spec in self.outputs}

    def close(self) -> None:
        """Close what belongs to the pipeline and let the rest go."""
        for stage in self.stages:
            if isinstance(stage, BuiltinStage):
                stage.model.close()
        self._release()


def reach(model: LoadedModel) -> frozenset[str]:
    """Return the names of all models that requests to this one lead to, through pipelines of pipelines too."""
    seen: set[str] = set()
    waiting = [model]
    while waiting:
        for stage in _model_stages(waiting.pop()):
            if stage.name not in seen:
                seen.add(stage.name)
                waiting += _below(stage)
    return frozenset(seen)


def _model_stages(model: LoadedModel) -> Iterator[ModelStage]:
    if isinstance(model, Pipeline):
        yield from (stage for stage in model.stages if isinstance(stage, ModelStage))


def _below(stage: ModelStage) -> list[LoadedModel]:
    try:
        return [stage.resolver.resolve(stage.name, stage.step.selector).model]
    except ServerError:
        return []  # leads nowhere at the moment


def _serves_as(found: LoadedModel, expected: Face) -> bool:
    return _agree(found.inputs, expected.inputs) and _agree(found.outputs, expected.outputs)


def _agree(found: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> bool:
    by_name = {spec.name: spec for spec in found}
    same_names = by_name.keys() == {spec.name for spec in expected}
    return same_names and all(fits(by_name[spec.name], spec) for spec in expected)
