"""Prepares the folder of a training: a new training, or one that an earlier process left unfinished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lathe.core.errors import LatheError
from lathe.core.frontends.export import export
from lathe.core.ir.graph import Graph
from lathe.core.language.language_model import load_language_model
from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.parent_model import with_language
from lathe.core.train.recipe.recipe import OnnxModel, PretrainedModel, Recipe, RecipeError
from lathe.core.train.run import work_folder
from lathe.core.train.text.language import language_of_model


class FolderError(LatheError):
    """The folder has another training, has no training to resume, or is not named."""


@dataclass(frozen=True)
class OptionNames:
    """The names of the caller's options, for error messages."""

    resume: str
    out: str


def begin_training(
    folder: Path,
    config: Recipe,
    first: Callable[[], bytes | Graph] | None,
    *,
    said: str,
    resume: bool,
    words: OptionNames,
    teacher: Path | None = None,
) -> None:
    """Write the recipe and the initial model into the folder; with `resume` only check that it has this recipe.

    `teacher` is the ONNX file of a distillation's teacher; RecipeError if it does not exist. `first` makes the initial
    model, the bytes of an ONNX file or a graph; None if the recipe describes it. `said` is the name of the recipe in
    messages, `words` are the names of options. FolderError if the folder has a training with a checkpoint or result
    already; with `resume` if it has no training, or one with another recipe.
    """
    if resume:
        if not (folder / work_folder.RECIPE).exists():
            raise FolderError(f"{folder}: there is no training to resume")
        if recipe.read(folder / work_folder.RECIPE) != config:
            raise FolderError(f"{folder}: the training in the folder has a different recipe than {said}")
        return
    if work_folder.has_begun(folder):
        hints = f"{words.resume} continues it, {words.out} selects another folder"
        raise FolderError(f"{folder}: the folder already has a training; {hints}")
    if teacher is not None and not teacher.is_file():
        raise RecipeError(f"{said}: distil.teacher: there is no file '{teacher}'")
    model = first() if first is not None else None
    work_folder.prepare(folder, config, model, teacher.read_bytes() if teacher is not None else None)


def initial_model_reader(config: Recipe, file: Path, parent: Path | None = None) -> Callable[[], bytes] | None:
    """A function that reads the initial model as the bytes of an ONNX file.

    The function reads the file that the recipe names, relative to the folder of the recipe's `file`; if the recipe
    names no file, it reads `parent`. None if the recipe names no file and `parent` is None. The function raises
    RecipeError if the file that the recipe names does not exist.
    """
    if isinstance(config.model, OnnxModel):
        path = file.parent / config.model.onnx
        return lambda: _read_model(path, file)
    if isinstance(config.model, PretrainedModel):
        source = file.parent / config.model.pretrained
        return lambda: _read_pretrained(source, file)
    return parent.read_bytes if parent is not None else None


def _read_pretrained(path: Path, file: Path) -> bytes:
    """A language model as an ONNX file that has its tokenizer, too."""
    if not path.exists():
        raise RecipeError(f"{file}: model.pretrained: there is no file or folder '{path}'")
    model = load_language_model(path)
    return with_language(export(model.graph), language_of_model(model))


def _read_model(path: Path, file: Path) -> bytes:
    if not path.is_file():
        raise RecipeError(f"{file}: model.onnx: there is no file '{path}'")
    return path.read_bytes()
