"""The tables of a recipe that compress the model while it is trained: pruning, quantization, distillation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from lathe.core.compress.aware import (
    ActivationCode,
    AwareQuantization,
    WeightCode,
    add_fake_quantization,
    as_quantized,
)
from lathe.core.compress.masked import MaskedTraining, Masks, Method, add_masks, fold_masks
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Graph
from lathe.core.section import Section
from lathe.core.train.training_step.train_step import TrainStep

PARENT = "parent"  # in place of the path of a teacher: the model that the training starts from

Names = tuple[str, ...]


class Prune(Section):
    """Pruning: weights become 0 during the training."""

    sparsity: float = Field(
        gt=0, lt=1, description="Share of zeros at the end; patterns `N:M` ignore it: `2:4` has half zeros."
    )
    pattern: str = Field(
        default="element",
        description="`element`; `2:4`: two of four consecutive inputs of an output stay; `4x1`: blocks of four inputs.",
    )
    method: Method = Field(
        default="magnitude",
        description="`magnitude`: the smallest weights go; `movement`: those with the smallest product of magnitude "
        "and a learned score.",
    )
    together: bool = Field(
        default=False, description="Whether the sparsity is that of all products together, not of each one."
    )
    start: float = Field(default=0.0, ge=0, lt=1, description="Share of the updates before the first zeros.")
    end: float = Field(default=0.7, gt=0, le=1, description="Share of the updates after which the sparsity stays.")
    changes: int = Field(default=100, ge=1, description="How often the masks change between `start` and `end`.")
    skip: Names = Field(default=(), strict=False, description="Names of nodes whose weights are not pruned.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.options()
        except UnsupportedError as error:
            raise ValueError(str(error)) from None
        return self

    def options(self) -> MaskedTraining:
        values = self.model_dump()
        is_global, skip = values.pop("together"), frozenset(values.pop("skip"))
        return MaskedTraining(**values, is_global=is_global, skip=skip)


class Quantize(Section):
    """Quantization-aware training: the result computes with integers."""

    weights: WeightCode = Field(
        default="int8",
        description="Code of the weights: `int8`, `int4`, `int2`, `ternary`, `trained_ternary`, `binary` or "
        "`power_of_two`.",
    )
    activations: ActivationCode = Field(
        default="int8", description="`int8`, or `float32`: only weights are stored in few bits."
    )
    per_channel: bool = Field(default=True, description="Whether each output channel has a scale of its own.")
    keeps_ends: bool = Field(
        default=True, description="Whether the weights of the first and the last product are `int8` in any case."
    )
    skip: Names = Field(default=(), strict=False, description="Names of nodes that stay float32.")

    def options(self) -> AwareQuantization:
        values = self.model_dump()
        return AwareQuantization(**{**values, "skip": frozenset(values["skip"])})


class Distil(Section):
    """Distillation: the model learns from the outputs of a teacher, too."""

    teacher: str = Field(
        min_length=1,
        description="An ONNX file, relative to the recipe (not in jobs); or `parent`: the version in the field "
        "`model` of a job, or the file of `lathe train --parent`.",
    )
    temperature: float = Field(
        default=2.0, gt=0, le=1000, description="Divides the numbers before the softmax of both models."
    )
    weight: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the distance from the teacher in the loss; the targets have the rest.",
    )


@dataclass(frozen=True)
class Compression:
    """What a recipe does to its model: before the training, after each update, and to the result."""

    prune: Prune | None = None
    quantize: Quantize | None = None

    def begin(self, model: Graph, batches: Iterable[Mapping[str, Any]], threads: int | None) -> Graph:
        """The model that is trained; `batches` of its inputs give the first scales of a quantization."""
        if self.prune is not None:
            return add_masks(model, self.prune.options())
        if self.quantize is not None:
            return add_fake_quantization(model, batches, self.quantize.options(), threads)
        return model

    def finish(self, trained: Graph) -> Graph:
        """The result, from the model with its trained weights."""
        if self.prune is not None:
            return fold_masks(trained)
        return as_quantized(trained) if self.quantize is not None else trained


class Pruner:
    """Changes the masks of a training step by the schedule of a recipe; `names` are those of their constants."""

    def __init__(self, model: Graph, settings: Prune, updates: int) -> None:
        """`model` has masks, and is trained with `updates` updates."""
        self._options, self._updates = settings.options(), updates
        self._masks = Masks(model, self._options)

    @property
    def names(self) -> frozenset[str]:
        return self._masks.names

    def after_update(self, learner: TrainStep) -> None:
        """Write new masks if the number of updates asks for them."""
        sparsity = self._options.sparsity_after(learner.updates, self._updates)
        if sparsity is None:
            return
        constants: dict[str, Array] = learner.weights()
        for name, mask in self._masks.of(constants, sparsity).items():
            learner.write(name, mask)


def teacher_path(settings: Distil | None, recipe: Path) -> Path | None:
    """The file of a recipe's teacher; None if the recipe names none, or the parent. `recipe` is the recipe's file."""
    if settings is None or is_parent(settings):
        return None
    return recipe.parent / settings.teacher


def is_parent(settings: Distil | None) -> bool:
    """Whether the teacher is the model that the training starts from, or that a job names."""
    return settings is not None and settings.teacher == PARENT
