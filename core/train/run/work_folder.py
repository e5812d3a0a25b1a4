"""The work folder of a training. One process at a time works in it; a later process resumes the training.

    recipe.json       the recipe
    parent.onnx       the model to fine-tune, unless another path is given; or
    parent/           that model as a graph: graph.lir, weights.bin
    teacher.onnx      the teacher of a distillation that the recipe names by a file
    lock              locked while a process works here

and what `FitRun` writes: events.jsonl, checkpoints/ and result/.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lathe.core.errors import LatheError
from lathe.core.ir.graph import Graph
from lathe.core.train import report
from lathe.core.train.data import Dataset
from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.data_selection import dataset_for
from lathe.core.train.recipe.parent_model import graph_files, read_parent
from lathe.core.train.recipe.recipe import OnnxModel, ParentModel, PretrainedModel, Recipe
from lathe.core.train.recipe.training_compression import is_parent
from lathe.core.train.recipe.training_setup import DEFAULT_RESOURCES, Resources
from lathe.core.train.run import checkpoint, events, result
from lathe.core.train.run.durable_files import write_file, write_folder
from lathe.core.train.run.training_loop import FitRun, Outcome, never_stop

RECIPE, PARENT, GRAPH, LOCK = "recipe.json", "parent.onnx", "parent", "lock"
TEACHER = "teacher.onnx"


class Occupied(LatheError):
    """Another process has locked the folder."""


@dataclass(frozen=True)
class Sources:
    """The inputs of a training. `parent` is the model to fine-tune, by default the one in the work folder."""

    dataset: Path
    parent: Path | None = None


@dataclass(frozen=True)
class OpenSources:
    """Sources whose dataset is open already, such as arrays in memory."""

    dataset: Dataset
    parent: Path | None = None


def prepare(folder: Path, config: Recipe, parent: bytes | Graph | None = None, teacher: bytes | None = None) -> None:
    """Write the recipe and the model to fine-tune (an ONNX file or a graph) into the folder, created if needed.

    `teacher` is the ONNX file of a distillation's teacher.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / GRAPH).exists():  # left by a training that never started
        shutil.rmtree(folder / GRAPH)
    if isinstance(parent, Graph):
        write_folder(folder / GRAPH, graph_files(parent))
    elif parent is not None:
        write_file(folder / PARENT, parent)
    if teacher is not None:
        write_file(folder / TEACHER, teacher)
    write_file(folder / RECIPE, config.model_dump_json(indent=1).encode())


def run_training(
    folder: Path,
    sources: Sources | OpenSources,
    resources: Resources = DEFAULT_RESOURCES,
    stop: Callable[[], bool] = never_stop,
    watch: events.Watcher | None = None,
) -> Outcome:
    """Run or resume the training in the folder until there is a result (DONE) or `stop` returns true (STOPPED).

    Also writes the report, if the result has none. `stop` and `watch` are those of `FitRun`. Occupied if another
    process works here. RecipeError, DataError or ModelError if recipe, data and model do not fit together. Diverged if
    the training diverges. OSError if a file cannot be read, or if there is no disk space for the result.
    """
    with hold_lock(folder):
        if (folder / result.FOLDER).is_dir():
            _emit_done(folder, watch)
            _report(folder, resources, watch)
            return Outcome.DONE
        try:
            outcome = _fit(folder, sources, resources, stop, watch).run()
        except (LatheError, OSError, MemoryError) as error:
            with events.EventLog(folder, watch) as event_log:
                event_log.emit("failed", error=str(error) or type(error).__name__)
            raise
        if outcome is Outcome.DONE:
            _report(folder, resources, watch)
        return outcome


def has_begun(folder: Path) -> bool:
    """Whether the folder holds a checkpoint or a result, which another training would overwrite."""
    return bool(checkpoint.steps(folder)) or (folder / result.FOLDER).is_dir()


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Context manager: hold the folder's lock. Occupied if another process has it.

    The system releases the lock if the process ends within the context.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(f"{folder}: another process is training here") from None
        yield


def _fit(
    folder: Path,
    sources: Sources | OpenSources,
    resources: Resources,
    stop: Callable[[], bool],
    watch: events.Watcher | None,
) -> FitRun:
    config = recipe.from_json((folder / RECIPE).read_bytes())
    path = sources.parent or next(filter(Path.exists, (folder / GRAPH, folder / PARENT)), folder / PARENT)
    needs_parent = isinstance(config.model, OnnxModel | PretrainedModel | ParentModel) or is_parent(config.distil)
    parent = read_parent(path) if needs_parent and path.exists() else None
    teacher = read_parent(folder / TEACHER).model if (folder / TEACHER).exists() else None
    dataset = sources.dataset if isinstance(sources, OpenSources) else dataset_for(config.data, sources.dataset)
    return FitRun(config, dataset, folder, parent, resources, teacher, stop=stop, watch=watch)


def _emit_done(folder: Path, watch: events.Watcher | None) -> None:
    """Emit the event `done` if a crash between writing the result and the event has lost it."""
    if any(event.kind == "done" for event in events.read(folder)):
        return
    record = result.read_metrics(folder)
    with events.EventLog(folder, watch) as event_log:
        event_log.emit("done", metrics=record["metrics"], seconds=record["seconds"])


def _report(folder: Path, resources: Resources, watch: events.Watcher | None) -> None:
    """Write the report of a result that has none. A failure is logged: the result is valid without a report."""
    if (folder / result.FOLDER / report.FILE).exists():
        return
    try:
        report.write(folder, resources.threads)
    except Exception as error:  # any error: the training has succeeded
        with events.EventLog(folder, watch) as event_log:
            event_log.emit("log", message=f"the report could not be written: {error!r}")
