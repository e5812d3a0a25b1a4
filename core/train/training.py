"""`fit`: a training from Python, run as `lathe train` runs it: the same checks, bar, checkpoints, report and result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console

from core.errors import DataError
from core.nn.module import Module
from core.train import work
from core.train.assembly import Means
from core.train.beginning import FolderError, Words, begin, first_weights
from core.train.data import Dataset, from_arrays
from core.train.fitting import Outcome
from core.train.learner import Given, learner_of
from core.train.optimizers import Optimizer
from core.train.recipe import Recipe
from core.train.selection import dataset_for
from core.train.tables import Asked, completed, tables_of
from core.train.trained import Trained
from core.train.watched import work_watched
from core.train.work import Opened

Learnt: TypeAlias = "Mapping[str, Any] | tuple[Any, Any] | Dataset | str | os.PathLike[str]"

_WORDS = Words("resume=True", "out=")


def fit(
    model: Given,
    data: Learnt,
    recipe: Asked = None,
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

    ``model``: a `core.nn.Module` or its class, a `core.Graph`, the path of an ONNX file, the name of an architecture
    or its table; None for the recipe's own. ``data``: arrays by the names of their columns, a pair of inputs and
    targets, or a file or folder as `lathe train` takes it. ``recipe``: a file, or its tables as a mapping; ``epochs``,
    ``batch``, ``optimizer`` (a name, a table or an object of `core.train.optimizers`) and ``rate`` take the place of
    what it says. Without an optimizer it is Adam.

    A module takes rows of the data as float32, channels first, tokens as whole numbers; or what ``inputs`` says, such
    as {"x": "float32[n,1,28,28]"}. An object holds the trained weights afterwards; a class is made with the recipe's
    seed.

    ``out`` is the folder of the training, by default one named after the recipe or the model that no training is in.
    ``resume`` goes on with the training in ``out``, and with the model that lies there. ``progress`` shows a bar,
    ``curves`` the loss and metrics below.
    Ctrl-C writes a checkpoint and raises KeyboardInterrupt.

    RecipeError, DataError, ModelError or FolderError for what does not fit together; Diverged for a loss that is no
    number; OSError where there is no room for the result.
    """
    tables = tables_of(recipe)
    learner = learner_of(model, tables.get("model"), inputs)
    what = completed({**tables, "model": learner.table}, epochs, batch, optimizer, rate)
    dataset = _dataset(data, what)
    file = Path(recipe) if isinstance(recipe, str | os.PathLike) else Path("recipe")
    folder = _folder(out, resume, file.stem if file.suffix else learner.name)
    first = partial(learner.first, what, dataset) if learner.first is not None else first_weights(what, file)
    begin(folder, what, first, said="the one given", resume=resume, words=_WORDS)
    console = Console(markup=False, highlight=False) if progress else None
    outcome = work_watched(folder, Opened(dataset), Means(threads), console, curves)
    if outcome is Outcome.STOPPED:
        raise KeyboardInterrupt(f"stopped; fit(..., out={str(folder)!r}, resume=True) goes on with the training")
    trained = Trained(folder)
    if learner.module is not None:
        _give_back(learner.module, trained)
    return trained


def _dataset(data: Any, what: Recipe) -> Dataset:
    """Read the argument `data`. DataError for what is none."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | os.PathLike):
        return dataset_for(what.data, Path(data))
    if isinstance(data, tuple) and len(data) == 2:
        data = dict(zip("xy", data, strict=True))
    if not isinstance(data, Mapping):
        said = f"a tuple of {len(data)}" if isinstance(data, tuple) else type(data).__name__
        expected = "arrays by name, a pair (inputs, targets), or the path of a file or folder"
        raise DataError(f"expected {expected}, got {said}", file="data")
    if odd := [name for name in data if not isinstance(name, str)]:
        raise DataError(f"expected names of columns, got {odd[0]!r}", file="data")
    return from_arrays({name: np.asarray(values) for name, values in data.items()}, "data")


def _folder(out: str | os.PathLike[str] | None, resume: bool, name: str) -> Path:
    """The folder of a training: the one given, or the first of NAME, NAME-2, NAME-3 that nothing else is in."""
    if out is not None:
        return Path(out)
    if resume:
        raise FolderError("resume: expected the folder of the training as well, out=...")
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(path for path in map(Path, names) if not path.exists() or _is_free(path))


def _is_free(path: Path) -> bool:
    """Whether a folder holds a training that ended before its first checkpoint, and so holds nothing to be lost."""
    return (path / work.RECIPE).is_file() and not work.has_begun(path)


def _give_back(module: Module, trained: Trained) -> None:
    """Have a module hold the weights that were trained; what the graph does not use stays as it is."""
    weights, own = trained.weights, module.state_dict()
    module.load_state_dict({**own, **{name: weights[name] for name in own if name in weights}})
