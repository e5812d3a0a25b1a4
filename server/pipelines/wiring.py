"""In which order a pipeline's steps run, and whether their tensors' types fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, TypeAlias

from server.pipelines.definition import BadPipeline, Definition, StepDef
from server.types import TensorSpec


class Interface(Protocol):
    """What a step takes and gives."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...


Types: TypeAlias = dict[str, TensorSpec]  # of the pipeline's tensors, as far as they are known


def in_order(definition: Definition) -> tuple[StepDef, ...]:
    """Return the steps so that each comes after those whose outputs it takes; raises BadPipeline for a cycle."""
    there = {given.name for given in definition.inputs}
    waiting, ordered = list(definition.step), list[StepDef]()
    while waiting:
        ready = [step for step in waiting if there.issuperset(step.inputs.values())]
        if not ready:
            raise BadPipeline(f"steps {_listed(step.name for step in waiting)} wait for each other's outputs")
        there.update(tensor for step in ready for tensor in step.outputs.values())
        ordered += ready
        waiting = [step for step in waiting if step not in ready]
    return tuple(ordered)


def known_types(definition: Definition) -> Types:
    """Return the types that the pipeline's inputs are declared to have."""
    return {given.name: given.spec for given in definition.inputs if given.spec is not None}


def attach(step: StepDef, interface: Interface, types: Types) -> None:
    """Check a step against the tensors it takes, and note the types of those it gives; raises BadPipeline."""
    takes, gives = _by_name(interface.inputs), _by_name(interface.outputs)
    if step.inputs.keys() != takes.keys():
        raise BadPipeline(f"step {step.name!r}: expected inputs {sorted(takes)}, got {sorted(step.inputs)}")
    if unknown := step.outputs.keys() - gives.keys():
        raise BadPipeline(f"step {step.name!r}: expected outputs among {sorted(gives)}, got {sorted(unknown)}")
    for name, tensor in step.inputs.items():
        types[tensor] = _joined(step, takes[name], tensor, types.get(tensor))
    for name, tensor in step.outputs.items():
        types[tensor] = replace(gives[name], name=tensor)


def fits(given: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether a tensor of one type may go where the other is expected; a size of -1 may turn out to be any."""
    if given.datatype != wanted.datatype or given.any_rank or wanted.any_rank:
        return given.datatype == wanted.datatype
    return len(given.shape) == len(wanted.shape) and all(
        -1 in (g, w) or g == w for g, w in zip(given.shape, wanted.shape, strict=True)
    )


def _joined(step: StepDef, wanted: TensorSpec, tensor: str, given: TensorSpec | None) -> TensorSpec:
    """Return what is known of a tensor once a step takes it."""
    if given is None:
        return replace(wanted, name=tensor)
    if not fits(given, wanted):
        raise BadPipeline(
            f"step {step.name!r}, input {wanted.name!r}: expected {wanted.text}, tensor {tensor!r} is {given.text}"
        )
    if given.any_rank or wanted.any_rank:
        return replace(wanted if given.any_rank else given, name=tensor)
    return TensorSpec(tensor, given.datatype, tuple(map(max, given.shape, wanted.shape)))


def _by_name(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
