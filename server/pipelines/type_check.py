"""The order of a pipeline's steps (topological), and the check of their tensors' types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, TypeAlias

from lathe.server.pipelines.definition import BadPipeline, Definition, StepDef
from lathe.server.types import TensorSpec


class Interface(Protocol):
    """The inputs and outputs of a step."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...


Types: TypeAlias = dict[str, TensorSpec]  # the known types of the pipeline's tensors


def topological_order(definition: Definition) -> tuple[StepDef, ...]:
    """Return the steps in topological order; raises BadPipeline for a cycle."""
    available = {given.name for given in definition.inputs}
    waiting, ordered = list(definition.step), list[StepDef]()
    while waiting:
        ready = [step for step in waiting if available.issuperset(step.inputs.values())]
        if not ready:
            raise BadPipeline(f"steps {_join_names(step.name for step in waiting)} wait for each other's outputs")
        available.update(tensor for step in ready for tensor in step.outputs.values())
        ordered += ready
        waiting = [step for step in waiting if step not in ready]
    return tuple(ordered)


def declared_types(definition: Definition) -> Types:
    """Return the types of the pipeline's inputs by name, without inputs that declare no datatype or shape."""
    return {given.name: given.spec for given in definition.inputs if given.spec is not None}


def check_step(step: StepDef, interface: Interface, types: Types) -> None:
    """Check a step's names and input types against its model's `interface`; raises BadPipeline.

    Adds the types of its outputs to `types` (the pipeline's tensors), and refines those of its inputs there.
    """
    step_inputs, step_outputs = _by_name(interface.inputs), _by_name(interface.outputs)
    if step.inputs.keys() != step_inputs.keys():
        raise BadPipeline(f"step {step.name!r}: expected inputs {sorted(step_inputs)}, got {sorted(step.inputs)}")
    if unknown := step.outputs.keys() - step_outputs.keys():
        raise BadPipeline(f"step {step.name!r}: expected outputs among {sorted(step_outputs)}, got {sorted(unknown)}")
    for name, tensor in step.inputs.items():
        types[tensor] = _merge_types(step, step_inputs[name], tensor, types.get(tensor))
    for name, tensor in step.outputs.items():
        types[tensor] = replace(step_outputs[name], name=tensor)


def is_compatible(given: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether a tensor of type `given` may be passed as `wanted`: same datatype, and a shape that may be equal.

    A size of -1 and any rank, on either side, fit everything.
    """
    if given.datatype != wanted.datatype or given.any_rank or wanted.any_rank:
        return given.datatype == wanted.datatype
    return len(given.shape) == len(wanted.shape) and all(
        -1 in (g, w) or g == w for g, w in zip(given.shape, wanted.shape, strict=True)
    )


def _merge_types(step: StepDef, wanted: TensorSpec, tensor: str, given: TensorSpec | None) -> TensorSpec:
    """Return the type of the pipeline's `tensor`, as the input `wanted` of a step refines its type `given` so far.

    Each dynamic dimension takes the size of the other type, if that is known. Raises BadPipeline if they contradict.
    """
    if given is None:
        return replace(wanted, name=tensor)
    if not is_compatible(given, wanted):
        raise BadPipeline(
            f"step {step.name!r}, input {wanted.name!r}: expected {wanted.text}, tensor {tensor!r} is {given.text}"
        )
    if given.any_rank or wanted.any_rank:
        return replace(wanted if given.any_rank else given, name=tensor)
    return TensorSpec(tensor, given.datatype, tuple(map(max, given.shape, wanted.shape)))


def _by_name(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
