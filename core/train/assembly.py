"""What a recipe asks for, made: the split, the model, the training step and what judges it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from core.ir.graph import Array, Graph
from core.train import losses
from core.train.data import Column, Dataset, Examples, Loader, Plan, Rows, Split, plan, taking
from core.train.data.preprocess import SCOPE
from core.train.evaluation import Evaluation
from core.train.heads import with_head
from core.train.joint import NO_CLIP, Clip, Trainable, check_inputs, is_weight
from core.train.losses import Loss
from core.train.parent import Parent
from core.train.recipe import OnnxModel, ParentModel, Recipe, RecipeError
from core.train.selection import check_classes, check_tokens, examples_for, split_of
from core.train.stepping import TrainStep, step
from core.train.zoo import Settings, architecture
from core.train.zoo.transformer import TransformerEncoder


@dataclass(frozen=True)
class Means:
    """What a training may use: threads that compute, a folder for compiled code, threads that prepare batches, and the
    disk but for some bytes."""

    threads: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    workers: int = 1
    keep_free: int = 0


MEANS = Means()


@dataclass(frozen=True)
class Assembly:
    """A training that could begin. `model` takes rows as they are; the learner's takes what augmentation gives."""

    recipe: Recipe
    examples: Examples
    split: Split
    model: Graph
    learner: TrainStep
    evaluation: Evaluation
    means: Means

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.split.train) // self.recipe.batch)

    @property
    def judge(self) -> str:
        """The metric that epochs are compared by."""
        return self.recipe.judge or ("accuracy" if self.examples.classes is not None else "loss")

    def loader(self) -> Loader:
        """Batches to learn from."""
        return _loader(self.recipe, self.examples, self.split.train, self.means.workers)


def rows_to_learn(recipe: Recipe, dataset: Dataset) -> tuple[Plan, str]:
    """What a model of one's own takes, as an architecture does: rows of the data, preprocessed; and what its output is
    called. DataError for columns that do not fit the recipe."""
    examples = examples_for(recipe.data, dataset, cast=False)
    return plan(recipe.preprocess, examples, split_of(recipe.data, examples).train), _output(examples)


def assemble(recipe: Recipe, dataset: Dataset, parent: Parent | None = None, means: Means = MEANS) -> Assembly:
    """Make everything that a recipe names. RecipeError, DataError or ModelError for what does not fit together."""
    examples = examples_for(recipe.data, dataset, _given(recipe, parent), cast=not recipe.preprocess)
    parts = split_of(recipe.data, examples)
    model = _model(recipe, examples, parts.train, parent)
    examples, loss = _all_classes(examples, model), _loss(recipe, examples)
    _check(model, loss, examples)
    _check_recipe(recipe, examples, len(parts.train))
    if isinstance(recipe.model, TransformerEncoder) and recipe.model.vocabulary is not None:
        check_tokens(examples, recipe.model.vocabulary)
    learner = _learner(recipe, taking(model, _loader(recipe, examples, parts.train).inputs), loss, parts.train, means)
    evaluation = Evaluation(learner, recipe.average is not None, model)
    return Assembly(recipe, examples, parts, model, learner, evaluation, means)


# -- data -------------------------------------------------------------------------------------------------------------


def _loader(recipe: Recipe, examples: Examples, rows: Rows, workers: int = 0) -> Loader:
    return Loader(examples, rows, recipe.batch, recipe.seed, transforms=recipe.augment, workers=workers)


# -- model ------------------------------------------------------------------------------------------------------------


def _given(recipe: Recipe, parent: Parent | None) -> Parent | None:
    """The model that exists already, or None for an architecture."""
    if not isinstance(recipe.model, OnnxModel | ParentModel):
        return None
    if parent is None:
        raise RecipeError("model: goes on from a model, and none was given")
    return Parent(parent.model) if _gets_head(recipe) else parent  # whose classes are forgotten


def _gets_head(recipe: Recipe) -> bool:
    return isinstance(recipe.model, ParentModel) and recipe.model.head == "replace"


def _model(recipe: Recipe, examples: Examples, rows: Rows, parent: Parent | None) -> Graph:
    """What will be served, with its first weights: preprocessing, and what learns behind it."""
    given = _given(recipe, parent)
    model = given.model if given is not None else None
    if model is not None and _gets_head(recipe):
        model = with_head(model, _outputs(examples), recipe.seed)
    if model is not None and not recipe.preprocess:
        return model
    ready = plan(recipe.preprocess, examples, rows)
    return ready.write(model if model is not None else _architecture(recipe, examples, ready.rows))


def _architecture(recipe: Recipe, examples: Examples, rows: dict[str, Column]) -> Graph:
    assert isinstance(recipe.model, Settings)
    return architecture(recipe.model, rows, _outputs(examples), output=_output(examples), seed=recipe.seed)


def _output(examples: Examples) -> str:
    """What the output of a new model is called."""
    return "logits" if examples.classes else "y"


def _outputs(examples: Examples) -> int:
    """How many numbers a model has to answer."""
    return len(examples.classes) if examples.classes else prod(examples.target.shape)


def _loss(recipe: Recipe, examples: Examples) -> Loss:
    if recipe.loss is not None:
        found: Loss = recipe.loss.make()
        return found
    return losses.CrossEntropy() if examples.classes is not None else losses.MeanSquaredError()


def _learner(recipe: Recipe, model: Graph, loss: Loss, rows: Rows, means: Means) -> TrainStep:
    optimizer, batches = recipe.optimizer.make(), -(-len(rows) // recipe.batch)
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
        trainable=_trainable(model, getattr(recipe.model, "trainable", ("*",))),
        seed=recipe.seed,
        device=recipe.device,
        precision=recipe.precision,
        memory=recipe.memory,
        threads=means.threads,
        cache_dir=means.cache_dir,
    )


def _trainable(model: Graph, patterns: Sequence[str]) -> Trainable:
    """Which weights learn: those that a pattern names. RecipeError for a pattern that names none."""
    weights = [value.name for value, array in model.constants.items() if is_weight(value.name, array)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in weights):
            raise RecipeError(f"model.trainable: {pattern!r} names none of the weights {', '.join(weights[:40])}")

    def learns(name: str, array: Array) -> bool:
        chosen = any(fnmatchcase(name, pattern) for pattern in patterns)
        return chosen and is_weight(name, array) and not name.startswith(SCOPE)

    return learns


def _all_classes(examples: Examples, model: Graph) -> Examples:
    """With a name for each class that the model tells, where the data have the first ones only."""
    classes, output = examples.classes, model.outputs[0].tensor
    answers = output.dims[1] if output.rank > 1 else 1
    if classes is None or not isinstance(answers, int) or answers <= len(classes):
        return examples
    names = (*classes, *map(str, range(len(classes), answers)))
    return replace(examples, target=replace(examples.target, classes=names))


# -- whether they fit -------------------------------------------------------------------------------------------------


def _check(model: Graph, loss: Loss, examples: Examples) -> None:
    """Target and classes of the data against those of the model."""
    check_inputs(model)
    output = model.outputs[0].tensor
    expected, target = loss.target(output), examples.target
    if expected.dtype is not target.dtype or expected.rank != 1 + len(target.shape):
        raise RecipeError(f"loss: expects a target of {expected} beside an output of {output}; rows have {target}")
    check_classes(output, examples)


def _check_recipe(recipe: Recipe, examples: Examples, rows: int) -> None:
    """What a recipe says of epochs and updates against the data."""
    if recipe.judge == "accuracy" and examples.classes is None:
        raise RecipeError(f"judge: expects classes, whose accuracy there is; rows have {examples.target}")
    if recipe.accumulate > (steps := recipe.epochs * -(-rows // recipe.batch)):
        raise RecipeError(f"accumulate: {recipe.accumulate} steps make one update, all epochs have {steps} together")
