"""How a training begins: in a folder of its own that says what to train, or where another process has left it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import LatheError
from core.ir.graph import Graph
from core.train import recipe, work
from core.train.recipe import OnnxModel, Recipe, RecipeError


class FolderError(LatheError):
    """A folder that another training is in, or none that could go on."""


@dataclass(frozen=True)
class Words:
    """What the caller calls its options, for errors."""

    resume: str
    out: str


def begin(
    folder: Path, what: Recipe, first: Callable[[], bytes | Graph] | None, *, said: str, resume: bool, words: Words
) -> None:
    """Write the recipe and the model to begin with into the folder, or see that they are there.

    ``said``: what errors call the recipe. FolderError where a training is in the way, or missing, or another.
    """
    if resume:
        if not (folder / work.RECIPE).exists():
            raise FolderError(f"{folder}: there is no training to go on with")
        if recipe.read(folder / work.RECIPE) != what:
            raise FolderError(f"{folder}: the training there has another recipe than {said}")
        return
    if work.has_begun(folder):
        hints = f"{words.resume} goes on with it, {words.out} names another folder"
        raise FolderError(f"{folder}: there is a training already; {hints}")
    work.prepare(folder, what, first() if first is not None else None)


def first_weights(what: Recipe, file: Path, parent: Path | None = None) -> Callable[[], bytes] | None:
    """What reads the model to begin with: the file that the recipe names, which lies beside the recipe's own; else
    ``parent``; None without either."""
    if isinstance(what.model, OnnxModel):
        path = file.parent / what.model.onnx
        return lambda: _beside(path, file)
    return parent.read_bytes if parent is not None else None


def _beside(path: Path, file: Path) -> bytes:
    if not path.is_file():
        raise RecipeError(f"{file}: model.onnx: there is no file {path}")
    return path.read_bytes()
