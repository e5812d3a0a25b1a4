"""A training's folder and the work in it: one process at a time, and as often as it takes.

    recipe.json       what to train
    parent.onnx       the model it goes on from, if it does and no other is named; or
    parent/           that model as a graph: graph.lir, weights.bin
    lock              held while somebody works here

and what `Fit` writes: events.jsonl, checkpoints/ and result/.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.errors import LatheError
from core.ir.graph import Graph
from core.train import checkpoint, events, recipe, report, result
from core.train.assembly import MEANS, Means
from core.train.data import Dataset
from core.train.durable import write_file, write_folder
from core.train.fitting import Fit, Outcome, never
from core.train.parent import graph_files, read_parent
from core.train.recipe import OnnxModel, ParentModel, Recipe
from core.train.selection import dataset_for

RECIPE, PARENT, GRAPH, LOCK = "recipe.json", "parent.onnx", "parent", "lock"


class Occupied(LatheError):
    """Another process works in the folder."""


@dataclass(frozen=True)
class Sources:
    """What a training begins with. `parent`: the model to go on from; without it the folder's."""

    dataset: Path
    parent: Path | None = None


@dataclass(frozen=True)
class Opened:
    """Sources whose data are open already: arrays in memory, say."""

    dataset: Dataset
    parent: Path | None = None


def prepare(folder: Path, what: Recipe, parent: bytes | Graph | None = None) -> None:
    """Write down what to train, in a folder that is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / GRAPH).exists():  # of a training that never began
        shutil.rmtree(folder / GRAPH)
    if isinstance(parent, Graph):
        write_folder(folder / GRAPH, graph_files(parent))
    elif parent is not None:
        write_file(folder / PARENT, parent)
    write_file(folder / RECIPE, what.model_dump_json(indent=1).encode())


def work(
    folder: Path,
    sources: Sources | Opened,
    means: Means = MEANS,
    stop: Callable[[], bool] = never,
    watch: events.Watcher | None = None,
) -> Outcome:
    """Train what the folder says, from where it was left, until there is a result or `stop` says so.

    Raises Occupied; RecipeError, DataError or ModelError for what does not fit together; Diverged; OSError.
    """
    with locked(folder):
        if (folder / result.FOLDER).is_dir():
            _tell_done(folder, watch)
            _report(folder, means, watch)
            return Outcome.DONE
        try:
            outcome = _fit(folder, sources, means, stop, watch).run()
        except (LatheError, OSError, MemoryError) as error:
            with events.Events(folder, watch) as told:
                told.emit("failed", error=str(error) or type(error).__name__)
            raise
        if outcome is Outcome.DONE:
            _report(folder, means, watch)
        return outcome


def has_begun(folder: Path) -> bool:
    """Whether there is something that another training in the folder would lose."""
    return bool(checkpoint.steps(folder)) or (folder / result.FOLDER).is_dir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Work in the folder alone. The lock goes with the process, however that ends."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(f"{folder}: another process is training here") from None
        yield


def _fit(
    folder: Path, sources: Sources | Opened, means: Means, stop: Callable[[], bool], watch: events.Watcher | None
) -> Fit:
    what = recipe.from_json((folder / RECIPE).read_bytes())
    path = sources.parent or next(filter(Path.exists, (folder / GRAPH, folder / PARENT)), folder / PARENT)
    parent = read_parent(path) if isinstance(what.model, OnnxModel | ParentModel) and path.exists() else None
    dataset = sources.dataset if isinstance(sources, Opened) else dataset_for(what.data, sources.dataset)
    return Fit(what, dataset, folder, parent, means, stop=stop, watch=watch)


def _tell_done(folder: Path, watch: events.Watcher | None) -> None:
    """The last event, where a crash has come between the result and it."""
    if any(event.kind == "done" for event in events.read(folder)):
        return
    record = result.read_metrics(folder)
    with events.Events(folder, watch) as told:
        told.emit("done", metrics=record["metrics"], seconds=record["seconds"])


def _report(folder: Path, means: Means, watch: events.Watcher | None) -> None:
    """Write the report of a result that has none. Without one the result is no worse."""
    if (folder / result.FOLDER / report.FILE).exists():
        return
    try:
        report.write(folder, means.threads)
    except Exception as error:  # whatever it is: the training has ended well
        with events.Events(folder, watch) as told:
            told.emit("log", message=f"the report could not be written: {error!r}")
