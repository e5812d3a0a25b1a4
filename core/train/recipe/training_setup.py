"""Makes the objects of a training from its recipe: the split, the model, the training step and its evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from math import prod
from typing import Any

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Graph
from lathe.core.train.data import Column, Dataset, Examples, Loader, Plan, Rows, Split, plan, taking
from lathe.core.train.data.preprocess import SCOPE
from lathe.core.train.recipe.data_selection import (
    check_classes,
    check_tokens,
    examples_for,
    split_of,
    with_all_classes,
)
from lathe.core.train.recipe.language_setup import is_language_recipe, set_up_language
from lathe.core.train.recipe.parent_model import Parent
from lathe.core.train.recipe.recipe import OnnxModel, ParentModel, PretrainedModel, Recipe, RecipeError
from lathe.core.train.recipe.training_compression import PARENT, Compression, Pruner
from lathe.core.train.text.language_task import ADAPTER_WEIGHTS, LanguageTask
from lathe.core.train.training_step import losses
from lathe.core.train.training_step.distillation import Distillation
from lathe.core.train.training_step.live_model import LiveModel
from lathe.core.train.training_step.losses import Loss
from lathe.core.train.training_step.output_heads import with_new_head
from lathe.core.train.training_step.step_graph import NO_CLIP, TARGET, Clip, Trainable, check_input_names, is_weight
from lathe.core.train.training_step.train_step import TrainStep, step
from lathe.core.train.zoo import Settings, architecture
from lathe.core.train.zoo.transformer import TransformerEncoder


@dataclass(frozen=True)
class Resources:
    """The resources of a training.

    `threads` compute, by default one per available CPU. `cache_dir` is the folder of the cache of compiled code, None
    for the default. `workers` threads prepare batches. `keep_free` bytes of the disk stay free.
    """

    threads: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    workers: int = 1
    keep_free: int = 0


DEFAULT_RESOURCES = Resources()
_CALIBRATION_ROWS = 512  # that give the first scales of activations


@dataclass(frozen=True)
class TrainingSetup:
    """The objects of a training that is ready to begin.

    `model` takes rows of the dataset. The model of `learner` has the same weights, and takes the batches of `loader`,
    whose types can differ because of augmentation. `evaluation` runs `model` on the weights of `learner`. The owner
    closes `learner`. `compression` makes the result from the trained model. `pruner`, if any, is called after updates.
    `task` is that of a language model.
    """

    recipe: Recipe
    examples: Examples
    split: Split
    model: Graph
    learner: TrainStep
    evaluation: LiveModel
    resources: Resources
    compression: Compression
    pruner: Pruner | None
    task: LanguageTask | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.split.train) // self.recipe.batch)

    @property
    def judge(self) -> str:
        """The validation metric that decides the best epoch."""
        return self.recipe.judge or ("accuracy" if self.examples.classes is not None else "loss")

    def loader(self) -> Loader:
        """A new loader of the training batches, which the caller closes."""
        return _loader(self.recipe, self.examples, self.split.train, self.resources.workers)


def plan_model_rows(recipe: Recipe, dataset: Dataset) -> tuple[Plan, str]:
    """The preprocessing plan for the rows that a new model takes, and the name of the model's output.

    DataError for columns that do not fit the recipe.
    """
    examples = examples_for(recipe.data, dataset, cast=False)
    return plan(recipe.preprocess, examples, split_of(recipe.data, examples).train), _output_name(examples)


def untrained_model(recipe: Recipe, dataset: Dataset) -> Graph:
    """The model that a training of `recipe` would serve, with its initial weights; the recipe names an architecture.

    RecipeError, DataError or ModelError if recipe and data do not fit together.
    """
    examples = examples_for(recipe.data, dataset, cast=not recipe.preprocess)
    return _model(recipe, examples, split_of(recipe.data, examples).train, None)


def set_up_training(
    recipe: Recipe,
    dataset: Dataset,
    parent: Parent | None = None,
    resources: Resources = DEFAULT_RESOURCES,
    teacher: Graph | None = None,
) -> TrainingSetup:
    """Make the objects of a training with `resources`; `parent` is the model to fine-tune, if any.

    `teacher` is the one that the recipe names by a file; a recipe may name `parent` instead. RecipeError, DataError or
    ModelError if recipe, data and parent do not fit together, or if the device of the recipe does not exist
    (UnsupportedError, a ModelError).
    """
    base = _parent(recipe, parent)
    if is_language_recipe(recipe, base):
        return _set_up_language_training(recipe, dataset, base, resources)
    if recipe.lora is not None:
        raise RecipeError("lora: adapters need a language model")
    examples = examples_for(recipe.data, dataset, base, cast=not recipe.preprocess)
    parts = split_of(recipe.data, examples)
    model = _model(recipe, examples, parts.train, parent)
    examples, loss = with_all_classes(examples, model), _loss(recipe, examples)
    _check(model, loss, examples)
    _check_recipe(recipe, examples, len(parts.train))
    if isinstance(recipe.model, TransformerEncoder) and recipe.model.vocabulary is not None:
        check_tokens(examples, recipe.model.vocabulary)
    compression = Compression(recipe.prune, recipe.quantize)
    model = compression.begin(model, _first_batches(recipe, examples, parts.train), resources.threads)
    pruner = Pruner(model, recipe.prune, _updates(recipe, parts.train)) if recipe.prune is not None else None
    inputs = _loader(recipe, examples, parts.train).inputs
    taught = _with_teacher(recipe, loss, parent, teacher, inputs)
    learner = _learner(recipe, taking(model, inputs), taught, parts.train, resources, pruner)
    evaluation = LiveModel(learner, recipe.average is not None, model, loss)
    return TrainingSetup(recipe, examples, parts, model, learner, evaluation, resources, compression, pruner)


def _set_up_language_training(
    recipe: Recipe, dataset: Dataset, parent: Parent | None, resources: Resources
) -> TrainingSetup:
    """`set_up_training` for a language model. Its model has rows of one length: the result takes any."""
    found = set_up_language(recipe, dataset, parent)
    model, rows = found.task.graph(recipe.text.length), found.split.train
    _check_recipe(recipe, found.examples, len(rows))
    learner = _learner(recipe, model, losses.NextToken(), rows, resources, None)
    evaluation = LiveModel(learner, recipe.average is not None, model, losses.NextToken())
    compression = Compression(None, None)
    return TrainingSetup(
        recipe, found.examples, found.split, model, learner, evaluation, resources, compression, None, found.task
    )


# -- data -------------------------------------------------------------------------------------------------------------


def _loader(recipe: Recipe, examples: Examples, rows: Rows, workers: int = 0) -> Loader:
    return Loader(examples, rows, recipe.batch, recipe.seed, transforms=recipe.augment, workers=workers)


def _first_batches(recipe: Recipe, examples: Examples, rows: Rows) -> Iterator[dict[str, Any]]:
    """Batches of training rows as the model takes them, without augmentation: about 512 rows."""
    with closing(Loader(examples, rows, recipe.batch, recipe.seed)) as loader:
        for batch in islice(loader.epoch(0), -(-_CALIBRATION_ROWS // recipe.batch)):
            yield {name: array for name, array in batch.items() if name != TARGET}


# -- model ------------------------------------------------------------------------------------------------------------


def _parent(recipe: Recipe, parent: Parent | None) -> Parent | None:
    """The model to fine-tune, without its class names if its head is replaced; None for an architecture.

    RecipeError if the recipe needs one and there is none.
    """
    if not isinstance(recipe.model, OnnxModel | PretrainedModel | ParentModel):
        return None
    if parent is None:
        raise RecipeError("model: expected a model to fine-tune, and none was given")
    return Parent(parent.model) if _needs_new_head(recipe) else parent  # a new head drops the old class names


def _needs_new_head(recipe: Recipe) -> bool:
    return isinstance(recipe.model, ParentModel) and recipe.model.head == "replace"


def _model(recipe: Recipe, examples: Examples, rows: Rows, parent: Parent | None) -> Graph:
    """The model to be served, with initial weights: preprocessing, then an architecture or the model to fine-tune."""
    base = _parent(recipe, parent)
    model = base.model if base is not None else None
    if model is not None and _needs_new_head(recipe):
        model = with_new_head(model, _output_count(examples), recipe.seed)
    if model is not None and not recipe.preprocess:
        return model
    ready = plan(recipe.preprocess, examples, rows)
    return ready.write(model if model is not None else _architecture(recipe, examples, ready.rows))


def _architecture(recipe: Recipe, examples: Examples, rows: dict[str, Column]) -> Graph:
    assert isinstance(recipe.model, Settings)
    return architecture(recipe.model, rows, _output_count(examples), output=_output_name(examples), seed=recipe.seed)


def _output_name(examples: Examples) -> str:
    """The name of a new model's output: `logits` for classes, `y` for numbers."""
    return "logits" if examples.classes else "y"


def _output_count(examples: Examples) -> int:
    """The number of outputs per row that a new model needs."""
    return len(examples.classes) if examples.classes else prod(examples.target.shape)


def _loss(recipe: Recipe, examples: Examples) -> Loss:
    if recipe.loss is not None:
        loss: Loss = recipe.loss.make()
        return loss
    return losses.CrossEntropy() if examples.classes is not None else losses.MeanSquaredError()


def _with_teacher(
    recipe: Recipe, loss: Loss, parent: Parent | None, teacher: Graph | None, inputs: Mapping[str, Column]
) -> Loss:
    """The loss of a recipe with distillation; `loss` itself without. RecipeError if the teacher is missing."""
    settings = recipe.distil
    if settings is None:
        return loss
    found = parent.model if settings.teacher == PARENT and parent is not None else teacher
    if found is None:
        raise RecipeError(f"distil.teacher: expected a model as {settings.teacher!r}, and none was given")
    try:
        return Distillation(loss, taking(found, inputs), settings.temperature, settings.weight)
    except UnsupportedError as error:
        raise RecipeError(f"distil: {error}") from None


def _updates(recipe: Recipe, rows: Rows) -> int:
    """The number of updates of the training."""
    return max(recipe.epochs * -(-len(rows) // recipe.batch) // recipe.accumulate, 1)


def _learner(
    recipe: Recipe, model: Graph, loss: Loss, rows: Rows, resources: Resources, pruner: Pruner | None
) -> TrainStep:
    optimizer, batches = recipe.optimizer.make(), -(-len(rows) // recipe.batch)
    updates = _updates(recipe, rows)
    schedule = recipe.schedule.make(optimizer.rate, updates, batches / recipe.accumulate) if recipe.schedule else None
    return step(
        model,
        loss,
        optimizer,
        schedule,
        clip=Clip(recipe.clip.norm, recipe.clip.value) if recipe.clip else NO_CLIP,
        accumulate=recipe.accumulate,
        average=recipe.average,
        trainable=_trainable(model, _trainable_names(recipe)),
        held=pruner.names if pruner is not None else (),
        seed=recipe.seed,
        device=recipe.device,
        precision=recipe.precision,
        memory=recipe.memory,
        threads=resources.threads,
        cache_dir=resources.cache_dir,
    )


def _trainable_names(recipe: Recipe) -> Sequence[str]:
    """The name patterns of the weights to train."""
    return ADAPTER_WEIGHTS if recipe.lora is not None else getattr(recipe.model, "trainable", ("*",))


def _trainable(model: Graph, patterns: Sequence[str]) -> Trainable:
    """A function of name and array that says which weights are trained: those whose name matches a pattern.

    Preprocessing is never trained. RecipeError for a pattern that matches no weight.
    """
    weights = [value.name for value, array in model.constants.items() if is_weight(value.name, array)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in weights):
            raise RecipeError(f"model.trainable: {pattern!r} matches none of the weights {', '.join(weights[:40])}")

    def is_trainable(name: str, array: Array) -> bool:
        chosen = any(fnmatchcase(name, pattern) for pattern in patterns)
        return chosen and is_weight(name, array) and not name.startswith(SCOPE)

    return is_trainable


# -- whether they fit -------------------------------------------------------------------------------------------------


def _check(model: Graph, loss: Loss, examples: Examples) -> None:
    """RecipeError, DataError or ModelError if target, classes or input names do not fit the model and the loss."""
    check_input_names(model)
    output = model.outputs[0].tensor
    expected, target = loss.target(output), examples.target
    if expected.dtype is not target.dtype or expected.rank != 1 + len(target.shape):
        raise RecipeError(f"loss: expected a target of {expected} for the output {output}, got {target}")
    check_classes(output, examples)


def _check_recipe(recipe: Recipe, examples: Examples, rows: int) -> None:
    """RecipeError if the recipe's metric or number of accumulated steps does not fit the data.

    `rows`: the number of training rows.
    """
    if recipe.judge == "accuracy" and examples.classes is None:
        raise RecipeError(f"judge: accuracy needs a target of classes, got {examples.target}")
    if recipe.accumulate > (steps := recipe.epochs * -(-rows // recipe.batch)):
        raise RecipeError(f"accumulate: expected at most the {steps} steps of all epochs, got {recipe.accumulate}")
