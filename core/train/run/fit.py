"""`fit`: train a model from Python. Checks, progress bar, checkpoints, report and result are those of `lathe train`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console

from lathe.core.errors import DataError
from lathe.core.nn.module import Module
from lathe.core.train.data import Dataset, from_arrays
from lathe.core.train.recipe.data_selection import dataset_for
from lathe.core.train.recipe.model_source import ModelArgument, model_source_of
from lathe.core.train.recipe.recipe import Recipe, RecipeError
from lathe.core.train.recipe.recipe_sources import RecipeArgument, complete_recipe, tables_of
from lathe.core.train.recipe.training_compression import teacher_path
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import work_folder
from lathe.core.train.run.folder_setup import FolderError, OptionNames, begin_training, initial_model_reader
from lathe.core.train.run.foreground import run_in_foreground
from lathe.core.train.run.trained import Trained
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.work_folder import OpenSources
from lathe.core.train.training_step.optimizers import Optimizer

DataArgument: TypeAlias = "Mapping[str, Any] | tuple[Any, Any] | Dataset | str | os.PathLike[str]"

_OPTION_NAMES = OptionNames("resume=True", "out=")


def fit(
    model: ModelArgument,
    data: DataArgument,
    recipe: RecipeArgument = None,
    *,
    epochs: int | None = None,
    batch: int | None = None,
    optimizer: Optimizer | Mapping[str, Any] | str | None = None,
    rate: float | None = None,
    inputs: Mapping[str, str] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    progress: bool = True,
    curves: bool = False,
) -> Trained:
    """Train a model as `lathe train` does, and return the result.

    `model` is a `lathe.core.nn.Module` or a class of modules, a `lathe.Graph`, the path of an ONNX file, the name of an
    architecture, or the recipe's table `model`; None for the model of the recipe. `data` is a mapping from column names
    to arrays, a pair (inputs, targets), a `Dataset`, or a file or folder as `lathe train` takes it. `recipe` is a file,
    a `Recipe`, or its tables as a mapping. `epochs`, `batch`, `optimizer` (a name, a table, or an object of
    `lathe.core.train.training_step.optimizers`) and `rate` override the recipe. The default optimizer is Adam.

    By default a module gets rows of the data as float32, images channels first, tokens as integers. `inputs` gives
    other input types, such as {"x": "float32[n,1,28,28]"}. A module object holds the trained weights afterwards. A
    class is instantiated with random weights drawn with the recipe's seed.

    `out` is the folder of the training. By default it is in the working directory, named after the recipe's file or the
    model, with a number if there is another training. `resume` continues the training in `out`, with the model stored
    there. `threads` compute, by default one per available CPU. `progress` shows a progress bar, `curves` the loss and
    the metrics below it. Ctrl-C in the main thread writes a checkpoint and raises KeyboardInterrupt.

    RecipeError, DataError, ModelError or FolderError for arguments that are invalid or do not fit together, Occupied if
    another process trains in the folder. Diverged if the training diverges. OSError if a file cannot be read, or if
    there is no disk space for the result.
    """
    tables = tables_of(recipe)
    learner = model_source_of(model, tables.get("model"), inputs)
    config = complete_recipe({**tables, "model": learner.table}, epochs, batch, optimizer, rate)
    dataset = _dataset(data, config)
    file = Path(recipe) if isinstance(recipe, str | os.PathLike) else Path("recipe")
    folder = _folder(out, resume, file.stem if file.suffix else learner.name)
    first = partial(learner.first, config, dataset) if learner.first is not None else initial_model_reader(config, file)
    if learner.module is not None and config.quantize is not None:
        raise RecipeError("quantize: expected a class of modules, a graph or a file as model: the result is no module")
    teacher = teacher_path(config.distil, file)
    words = _OPTION_NAMES
    begin_training(folder, config, first, said="the one given", resume=resume, words=words, teacher=teacher)
    console = Console(markup=False, highlight=False) if progress else None
    outcome = run_in_foreground(folder, OpenSources(dataset), Resources(threads), console, curves)
    if outcome is Outcome.STOPPED:
        raise KeyboardInterrupt(f"stopped; fit(..., out={str(folder)!r}, resume=True) continues the training")
    trained = Trained(folder)
    if learner.module is not None:
        _load_weights(learner.module, trained)
    return trained


def _dataset(data: Any, config: Recipe) -> Dataset:
    """Read the argument `data` of `fit`; a pair becomes the columns `x` and `y`. DataError for another type."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | os.PathLike):
        return dataset_for(config.data, Path(data))
    if isinstance(data, tuple) and len(data) == 2:
        data = dict(zip("xy", data, strict=True))
    if not isinstance(data, Mapping):
        said = f"a tuple of {len(data)}" if isinstance(data, tuple) else type(data).__name__
        expected = "arrays by name, a pair (inputs, targets), or the path of a file or folder"
        raise DataError(f"expected {expected}, got {said}", file="data")
    if invalid := [name for name in data if not isinstance(name, str)]:
        raise DataError(f"expected names of columns, got the key {invalid[0]!r}", file="data")
    return from_arrays({name: np.asarray(values) for name, values in data.items()}, "data")


def _folder(out: str | os.PathLike[str] | None, resume: bool, name: str) -> Path:
    """The folder of a training: `out`, or the first free one of NAME, NAME-2, NAME-3 ... in the working directory.

    FolderError for `resume` without `out`.
    """
    if out is not None:
        return Path(out)
    if resume:
        raise FolderError("resume: expected the folder of the training in `out`, too")
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(path for path in map(Path, names) if not path.exists() or _is_free(path))


def _is_free(path: Path) -> bool:
    """Whether an existing folder can be overwritten: it has a recipe, but no checkpoint and no result."""
    return (path / work_folder.RECIPE).is_file() and not work_folder.has_begun(path)


def _load_weights(module: Module, trained: Trained) -> None:
    """Load the trained weights into the module. Weights that are not in the trained graph stay unchanged."""
    weights, own = trained.weights, module.state_dict()
    module.load_state_dict({**own, **{name: weights[name] for name in own if name in weights}})
