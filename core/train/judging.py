"""Judging a model on data, in a folder as a training works in one.

recipe.json           a `Judgement`
result/metrics.json   what the model is worth, and which of its operators take longest
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from pydantic import Field

from core.compiler import compile
from core.errors import DataError, LatheError
from core.train import events, result
from core.train.assembly import Means
from core.train.data import Dataset, Examples, Rows
from core.train.durable import write_folder
from core.train.fitting import Outcome
from core.train.parent import Parent, read_parent
from core.train.recipe import Data, Names, checked
from core.train.report import slowest
from core.train.scores import Scores, Stopped, scores
from core.train.section import Section
from core.train.selection import check_classes, dataset_for, examples_for, split_of
from core.train.work import PARENT, RECIPE, Sources, locked


class Judgement(Section):
    """What a model is judged by."""

    data: Data = Field(default=Data(), description="Columns, and how rows are set apart.")
    rows: Literal["all", "train", "validation", "test"] = Field(
        default="all", description="Rows to judge by: all, or a part as a training with this `data` has it."
    )
    batch: int = Field(default=256, ge=1, le=1 << 20, description="Rows of a run.")
    classes: Names | None = Field(
        default=None, description="What the model calls the classes it tells, in its order; without it, its file says."
    )
    dealt: Names | None = Field(
        default=None, description="Order of the classes when rows are set apart, where a training had another one."
    )
    operators: bool = Field(default=True, description="Whether to time the operators, for 1, 16 and 64 rows.")


def from_json(text: bytes | str) -> Judgement:
    """A judgement from JSON. RecipeError names every field at fault."""
    return checked(Judgement, text)


def work(folder: Path, sources: Sources, means: Means, stop: Callable[[], bool]) -> Outcome:
    """Judge what the folder says, unless that is done already.

    Raises Occupied; RecipeError, DataError or ModelError for what does not go together; OSError.
    """
    with locked(folder), events.Events(folder) as told:
        if (folder / result.FOLDER).is_dir():
            return Outcome.DONE
        try:
            what = from_json((folder / RECIPE).read_bytes())
            dataset = dataset_for(what.data, sources.dataset)
            record = judge(what, dataset, sources.parent or folder / PARENT, means, stop)
            write_folder(folder / result.FOLDER, {result.METRICS: json.dumps(record, indent=1).encode()})
        except Stopped:
            return Outcome.STOPPED
        except (LatheError, OSError, MemoryError) as error:
            told.emit("failed", error=str(error) or type(error).__name__)
            raise
        told.emit("done", metrics=record["metrics"], seconds=record["seconds"])
    return Outcome.DONE


def judge(what: Judgement, dataset: Dataset, model: Path, means: Means, stop: Callable[[], bool]) -> dict[str, Any]:
    """What metrics.json holds. Stopped as soon as `stop` says so; RecipeError, DataError or ModelError."""
    began, parent = perf_counter(), read_parent(model)
    known = Parent(parent.model, what.classes or parent.classes)
    examples = examples_for(what.data, dataset, known)
    check_classes(parent.model.outputs[0].tensor, examples)
    rows = _rows(what, dataset, parent, examples)
    if not len(rows):
        raise DataError(f"no rows are set apart as '{what.rows}'", file=dataset.name)
    found = _run(model, examples, rows, what.batch, means, stop)
    record: dict[str, Any] = {
        "metrics": found.metrics,
        "rows": len(rows),
        "classes": examples.classes,
        "data": examples.digest,
        "model": hashlib.sha256(model.read_bytes()).hexdigest(),
        "version": result.code_version(),
    }
    if found.confusion is not None:
        record["confusion"] = found.confusion.tolist()
    if what.operators:
        record["operators"] = slowest(model, threads=means.threads)
    return {**record, "seconds": round(perf_counter() - began, 3)}


def _rows(what: Judgement, dataset: Dataset, parent: Parent, examples: Examples) -> Rows:
    if what.rows == "all":
        return np.arange(len(examples))
    dealt = examples_for(what.data, dataset, Parent(parent.model, what.dealt)) if what.dealt else examples
    rows: Rows = getattr(split_of(what.data, dealt), what.rows)
    return rows


def _run(model: Path, examples: Examples, rows: Rows, batch: int, means: Means, stop: Callable[[], bool]) -> Scores:
    with compile(model, threads=means.threads, max_batch=batch, cache_dir=means.cache_dir, tune="off") as session:
        output = next(iter(session.outputs))

        def run(feeds: Any) -> dict[str, Any]:
            return session.run({name: feeds[name] for name in session.inputs})

        return scores(run, examples, rows, batch, output, stop)
