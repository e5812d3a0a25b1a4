"""Evaluates a model on data, in a work folder like that of a training.

recipe.json           an `EvaluationRequest`
result/metrics.json   the model's metrics and, if `operators` is true, its slowest operators
events.jsonl          the events `done` or `failed`
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

from lathe.core.compiler.compile import compile
from lathe.core.errors import DataError
from lathe.core.section import Section
from lathe.core.train.data import Dataset, Examples, Rows
from lathe.core.train.recipe.data_selection import check_classes, dataset_for, examples_for, split_of, with_all_classes
from lathe.core.train.recipe.language_setup import language_examples
from lathe.core.train.recipe.parent_model import Parent, read_parent
from lathe.core.train.recipe.recipe import Data, Names, Text, parse_section
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.report import slowest_operators
from lathe.core.train.run import events, result
from lathe.core.train.run.scores import Scores, compute_scores
from lathe.core.train.run.single_run import SingleResult, run_once
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.work_folder import PARENT, RECIPE, Sources


class EvaluationRequest(Section):
    """The configuration of an evaluation."""

    data: Data = Field(default=Data(), description="Columns and split of the data.")
    rows: Literal["all", "train", "validation", "test"] = Field(
        default="all", description="Rows to evaluate on: all, or a part of the split that `data` describes."
    )
    text: Text = Field(default=Text(), description="Language models: how documents become rows of tokens.")
    batch: int = Field(default=256, ge=1, le=1 << 20, description="Rows per run.")
    classes: Names | None = Field(
        default=None, description="Class names in the order of the model's outputs; by default those in its file."
    )
    dealt: Names | None = Field(
        default=None, description="Order of the classes for the split, if the training had a different one."
    )
    operators: bool = Field(default=True, description="Whether to time the operators, for 1, 16 and 64 rows.")


def from_json(text: bytes | str) -> EvaluationRequest:
    """The configuration from JSON. RecipeError for text that is no JSON; otherwise it names every invalid field."""
    return parse_section(EvaluationRequest, text)


def run_evaluation(
    folder: Path, sources: Sources, resources: Resources, stop: Callable[[], bool], watch: events.Watcher | None = None
) -> Outcome:
    """Run the evaluation in the folder unless it has a result; DONE, or STOPPED if `stop` returned true.

    `sources.parent` is the model, by default `parent.onnx` in the folder. `watch` gets the events. Occupied if another
    process works here. RecipeError, DataError or ModelError if configuration, data and model do not fit together.
    OSError if a file cannot be read, or the result cannot be written.
    """

    def work(event_log: events.EventLog) -> SingleResult:
        request = from_json((folder / RECIPE).read_bytes())
        dataset = dataset_for(request.data, sources.dataset)
        record = evaluate(request, dataset, sources.parent or folder / PARENT, resources, stop)
        files = {result.METRICS: json.dumps(record, indent=1).encode()}
        return SingleResult(files, {"metrics": record["metrics"], "seconds": record["seconds"]})

    return run_once(folder, watch, work)


def evaluate(
    request: EvaluationRequest, dataset: Dataset, model: Path, resources: Resources, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Evaluate the model in the ONNX file `model`; returns the content of metrics.json, and writes no file.

    Stopped if `stop`, called before each batch, returns true. DataError or ModelError if configuration, data and model
    do not fit together, or if the split has no such rows.
    """
    began, parent = perf_counter(), read_parent(model)
    examples, rows = _examples(request, dataset, parent)
    if not len(rows):
        raise DataError(f"the split has no rows for '{request.rows}'", file=dataset.name)
    outcome = _run(model, examples, rows, request.batch, resources, stop)
    record: dict[str, Any] = {
        "metrics": outcome.metrics,
        "rows": len(rows),
        "classes": examples.classes,
        "data": examples.digest,
        "model": hashlib.sha256(model.read_bytes()).hexdigest(),
        "version": result.code_version(),
    }
    if outcome.confusion is not None:
        record["confusion"] = outcome.confusion.tolist()
    if request.operators:
        record["operators"] = slowest_operators(model, threads=resources.threads)
    return {**record, "seconds": round(perf_counter() - began, 3)}


def _examples(request: EvaluationRequest, dataset: Dataset, parent: Parent) -> tuple[Examples, Rows]:
    """The examples, and the numbers of the rows to evaluate on."""
    if parent.language is not None:
        tokens, parts = language_examples(request.text, request.data, dataset, parent.language)
        return tokens, np.arange(len(tokens)) if request.rows == "all" else getattr(parts, request.rows)
    base = Parent(parent.model, request.classes or parent.classes)
    examples = examples_for(request.data, dataset, base)
    check_classes(parent.model.outputs[0].tensor, examples)
    rows = _rows(request, dataset, parent, examples)
    return with_all_classes(examples, parent.model), rows


def _rows(request: EvaluationRequest, dataset: Dataset, parent: Parent, examples: Examples) -> Rows:
    if request.rows == "all":
        return np.arange(len(examples))
    split_examples = (
        examples_for(request.data, dataset, Parent(parent.model, request.dealt)) if request.dealt else examples
    )
    rows: Rows = getattr(split_of(request.data, split_examples), request.rows)
    return rows


def _run(
    model: Path, examples: Examples, rows: Rows, batch: int, resources: Resources, stop: Callable[[], bool]
) -> Scores:
    with compile(
        model, threads=resources.threads, max_batch=batch, cache_dir=resources.cache_dir, tune="off"
    ) as session:
        output = next(iter(session.outputs))

        def run(feeds: Any) -> dict[str, Any]:
            return session.run({name: feeds[name] for name in session.inputs})

        return compute_scores(run, examples, rows, batch, output, stop)
