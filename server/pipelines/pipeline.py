"""A loaded pipeline: its steps and the models that run them. The data path treats it as a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from lathe.server.backends.base import LoadedModel, as_tokenizing, devices, lost_reason
from lathe.server.errors import ServerError, Unavailable
from lathe.server.pipelines.definition import StepDef
from lathe.server.pipelines.type_check import is_compatible
from lathe.server.types import ModelRef, Tensors, TensorSpec

if TYPE_CHECKING:
    from lathe.server.serving.dataplane import Resolver
    from lathe.server.serving.servable import Servable

PLATFORM = "lathe_pipeline"


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """The interface of a step's model, without a reference to the model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int
    batchable: bool
    batch_reason: str

    @classmethod
    def of(cls, model: LoadedModel) -> ModelInterface:
        """Return the interface of a model."""
        return cls(model.inputs, model.outputs, model.max_batch, model.batchable, model.batch_reason)


class BuiltinStage:
    """A built-in step, whose model is loaded and closed with the pipeline.

    `alone`: requests are executed one by one, even if several were taken from the queue together. `inline`: short
    executions may run on the event loop's thread.
    """

    def __init__(self, step: StepDef, model: LoadedModel, *, alone: bool, inline: bool) -> None:
        self.step = step
        self.model = model
        self.interface = ModelInterface.of(model)
        self.alone = alone
        self.inline = inline


class ModelStage:
    """A step that is a model of the repository: a fixed version, or the one that an alias names at each request."""

    def __init__(self, step: StepDef, owner: str, resolver: Resolver, face: ModelInterface) -> None:
        """`owner`: the pipeline's name. `face`: the interface that the pipeline was checked against."""
        assert step.model is not None
        self.step = step
        self.interface = face
        self.name = step.model
        self._owner = owner
        self.resolver = resolver
        self._checked: WeakSet[Servable] = WeakSet()

    def servable(self) -> Servable:
        """Return the version that answers now; raises ServerError if there is none, or if its interface has changed.

        Also raises it if the version is a pipeline that leads back to this one.
        """
        found = self.resolver.route(self.name, self.step.selector)
        if found not in self._checked:
            self._check(found)
            self._checked.add(found)
        return found

    def latest(self) -> Servable:
        """Return the version that the alias names, whatever part a canary has; raises ServerError if there is none."""
        return self.resolver.resolve(self.name, self.step.selector)

    def _check(self, found: Servable) -> None:
        if not _has_interface(found.model, self.interface):
            raise Unavailable(
                f"{found.ref} has other inputs or outputs than the version that the pipeline was loaded with"
            )
        if self._owner in reachable_models(found.model):
            raise Unavailable(f"{found.ref} leads back to pipeline {self._owner!r}")


Stage = BuiltinStage | ModelStage


class Pipeline:
    """The steps in order of execution, with the inputs and outputs of the pipeline."""

    platform = PLATFORM

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` is called when the pipeline is closed, on any thread."""
        self.stages = tuple(stages)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._release = release
        self.max_batch = min(stage.interface.max_batch for stage in self.stages)
        unbatchable = [stage for stage in self.stages if not stage.interface.batchable]
        self.batchable = not unbatchable
        self.batch_reason = (
            f"step {unbatchable[0].step.name!r}: {unbatchable[0].interface.batch_reason}"
            if unbatchable
            else "every step keeps rows apart"
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of its built-in steps; its models count as models of their own."""
        return sum(stage.model.memory_bytes for stage in self._builtin_stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices besides the CPU that its built-in steps use."""
        return tuple(dict.fromkeys(name for stage in self._builtin_stages for name in devices(stage.model)))

    @property
    def lost(self) -> str:
        """The error of a lost device, by which a built-in step cannot run any more; empty if all can run."""
        return next(filter(None, (lost_reason(stage.model) for stage in self._builtin_stages)), "")

    @property
    def _builtin_stages(self) -> list[BuiltinStage]:
        return [stage for stage in self.stages if isinstance(stage, BuiltinStage)]

    @property
    def pins(self) -> frozenset[ModelRef]:
        """The versions that its steps name by number."""
        return frozenset(stage.step.pin for stage in self.stages if stage.step.pin is not None)

    @property
    def truncations(self) -> range:
        """The numbers of tokens to which all steps can truncate texts; empty if no step makes tokens of texts."""
        ranges = [each for stage in self.stages if (each := _truncations(stage))]
        return range(max(each.start for each in ranges), min(each.stop for each in ranges)) if ranges else range(0)

    def execute(self, inputs: Tensors) -> Tensors:
        """Run the steps one after the other on this thread, without their queues; for the warm-up."""
        tensors = dict(inputs)
        for stage in self.stages:
            step = stage.step
            model = stage.model if isinstance(stage, BuiltinStage) else stage.servable().model
            made = model.execute({name: tensors[tensor] for name, tensor in step.inputs.items()})
            tensors |= {tensor: made[name] for name, tensor in step.outputs.items()}
        return {spec.name: tensors[spec.name] for spec in self.outputs}

    def close(self) -> None:
        """Close the built-in steps, and release the versions of models."""
        for stage in self.stages:
            if isinstance(stage, BuiltinStage):
                stage.model.close()
        self._release()


def _truncations(stage: Stage) -> range:
    """The numbers of tokens to which a step can truncate texts, also in a pipeline that is a step."""
    if isinstance(stage, BuiltinStage):
        tokenizer = as_tokenizing(stage.model)
        return tokenizer.truncations if tokenizer is not None else range(0)
    models = _resolved_model(stage)
    return models[0].truncations if models and isinstance(models[0], Pipeline) else range(0)


def reachable_models(model: LoadedModel) -> frozenset[str]:
    """Return the names of all models that requests to `model` reach, also through nested pipelines."""
    seen: set[str] = set()
    waiting = [model]
    while waiting:
        for stage in _model_stages(waiting.pop()):
            if stage.name not in seen:
                seen.add(stage.name)
                waiting += _resolved_model(stage)
    return frozenset(seen)


def _model_stages(model: LoadedModel) -> Iterator[ModelStage]:
    if isinstance(model, Pipeline):
        yield from (stage for stage in model.stages if isinstance(stage, ModelStage))


def _resolved_model(stage: ModelStage) -> list[LoadedModel]:
    try:
        return [stage.latest().model]
    except ServerError:
        return []  # not loaded: reaches no model now


def _has_interface(found: LoadedModel, expected: ModelInterface) -> bool:
    return _agree(found.inputs, expected.inputs) and _agree(found.outputs, expected.outputs)


def _agree(found: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> bool:
    by_name = {spec.name: spec for spec in found}
    same_names = by_name.keys() == {spec.name for spec in expected}
    return same_names and all(is_compatible(by_name[spec.name], spec) for spec in expected)
