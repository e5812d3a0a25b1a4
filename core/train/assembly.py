"""What a recipe asks for, made: the split, the model, the training step and what judges it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import core.ops  # noqa: F401  (registers the operators)
from core.errors import ModelError
from core.ir.graph import Array, Graph
from core.ir.types import TensorType
from core.train import losses
from core.train.data import DataError, Dataset, Examples, Split, split
from core.train.evaluation import Evaluation
from core.train.joint import NO_CLIP, TARGET, Clip, Trainable, is_weight
from core.train.losses import Loss
from core.train.recipe import OnnxModel, ParentModel, Recipe, RecipeError
from core.train.selection import examples_for
from core.train.step import TrainStep, step
from core.train.zoo import Settings, architecture

FIXED = "preprocess."  # begins the names of constants that come from the data, and do not learn


@dataclass(frozen=True)
class Assembly:
    """A training that could begin."""

    recipe: Recipe
    examples: Examples
    split: Split
    learner: TrainStep
    evaluation: Evaluation

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.split.train) // self.recipe.batch)

    @property
    def counts_classes(self) -> bool:
        """Whether the model tells one of several classes."""
        return self.examples.classes is not None

    @property
    def judge(self) -> str:
        """The metric that epochs are compared by."""
        return self.recipe.judge or ("accuracy" if self.counts_classes else "loss")


def assemble(
    recipe: Recipe,
    dataset: Dataset,
    parent: Graph | None = None,
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Assembly:
    """Make everything that a recipe names; `classes` are those that the parent tells, where that is known.

    RecipeError, DataError or ModelError for what does not fit together.
    """
    model = _given(recipe, parent)
    examples = examples_for(recipe.data, dataset, model, classes)
    parts = split(examples, recipe.data.held_out, recipe.data.validation, recipe.data.stratified, recipe.data.seed)
    if model is None:
        model = _architecture(recipe, examples)
    loss = _loss(recipe, examples)
    _check(model, loss, examples)
    learner = _learner(recipe, model, loss, -(-len(parts.train) // recipe.batch), threads, cache_dir)
    return Assembly(recipe, examples, parts, learner, Evaluation(learner, averaged=recipe.average is not None))


def _given(recipe: Recipe, parent: Graph | None) -> Graph | None:
    """The model that exists already, or None for an architecture."""
    if not isinstance(recipe.model, OnnxModel | ParentModel):
        return None
    if parent is None:
        raise RecipeError("model: goes on from a model, and none was given")
    return parent


def _architecture(recipe: Recipe, examples: Examples) -> Graph:
    assert isinstance(recipe.model, Settings)
    classes = examples.classes
    outputs = len(classes) if classes else prod(examples.target.shape)
    name = "logits" if classes else "y"
    return architecture(recipe.model, examples.inputs, outputs, output=name, seed=recipe.seed)


def _loss(recipe: Recipe, examples: Examples) -> Loss:
    if recipe.loss is not None:
        found: Loss = recipe.loss.make()
        return found
    return losses.CrossEntropy() if examples.classes is not None else losses.MeanSquaredError()


def _learner(
    recipe: Recipe,
    model: Graph,
    loss: Loss,
    batches: int,
    threads: int | None,
    cache_dir: str | os.PathLike[str] | None,
) -> TrainStep:
    optimizer = recipe.optimizer.make()
    updates = max(recipe.epochs * batches // recipe.accumulate, 1)
    schedule = recipe.schedule.make(optimizer.rate, updates, batches / recipe.accumulate) if recipe.schedule else None
    return step(
        model,
        loss,
        optimizer,
        schedule,
        clip=Clip(recipe.clip.norm, recipe.clip.value) if recipe.clip else NO_CLIP,
        accumulate=recipe.accumulate,
        average=recipe.average,
        trainable=_trainable(getattr(recipe.model, "trainable", ("*",))),
        seed=recipe.seed,
        threads=threads,
        cache_dir=cache_dir,
    )


def _trainable(patterns: Sequence[str]) -> Trainable:
    def learns(name: str, array: Array) -> bool:
        chosen = any(fnmatchcase(name, pattern) for pattern in patterns)
        return chosen and is_weight(name, array) and not name.startswith(FIXED)

    return learns


def _check(model: Graph, loss: Loss, examples: Examples) -> None:
    """Inputs, target and classes of the data against those of the model."""
    given, wanted = set(examples.features), {value.name for value in model.inputs}
    if given != wanted:
        raise RecipeError(f"data.inputs: expected {_names(wanted)}, which the model has, got {_names(given)}")
    if TARGET in wanted:
        raise ModelError(f"has an input called '{TARGET}', the name of what it learns", where=f"graph '{model.name}'")
    output = model.outputs[0].tensor
    expected, target = loss.target(output), examples.target
    if expected.dtype is not target.dtype or expected.rank != 1 + len(target.shape):
        raise RecipeError(f"loss: expects a target of {expected} beside an output of {output}; rows have {target}")
    _check_classes(output, examples)


def _check_classes(output: TensorType, examples: Examples) -> None:
    classes, answers = examples.classes, output.dims[1] if output.rank > 1 else 1
    if classes is not None and isinstance(answers, int) and answers < len(classes):
        message = f"counts {len(classes)} classes, the model's output {output} tells {answers}"
        raise DataError(message, file=examples.dataset.name, column=examples.target.name)


def _names(names: set[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
