"""The result of a training: the exported model and its metrics, in a folder that is written in one step.

result/model.onnx       the trained model
result/config.json ...   of a language model: the files of a Hugging Face folder, which `result` is then as well
result/metrics.json     metrics on the test rows by the exported model compiled for serving; recipe, digest of the
                        data, classes, seed and version of Lathe
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lathe.core.compiler.compile import compile
from lathe.core.frontends.export import export
from lathe.core.ir.graph import Graph
from lathe.core.train.recipe.parent_model import with_classes, with_language
from lathe.core.train.recipe.training_setup import TrainingSetup
from lathe.core.train.run.durable_files import write_folder
from lathe.core.train.run.scores import Scores, compute_scores

FOLDER = "result"
MODEL, METRICS = "model.onnx", "metrics.json"


def code_version() -> str:
    """The version of Lathe; `unknown` if the package is not installed."""
    try:
        return version("lathe-server")  # the distribution; `lathe` on the package index is another project
    except PackageNotFoundError:
        return "unknown"


def read_metrics(folder: Path) -> dict[str, Any]:
    """The content of result/metrics.json of a training that has a result."""
    record: dict[str, Any] = json.loads((folder / FOLDER / METRICS).read_bytes())
    return record


def write_result(
    folder: Path, assembly: TrainingSetup, trained: Graph, facts: Mapping[str, Any], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Export, compile and test the model, and write the result; returns the content of metrics.json.

    `facts` are further entries of metrics.json. Stopped if `stop` returns true before a batch of the test, OSError if
    there is no disk space. In both cases there is no result.
    """
    files: dict[str, bytes] = {}
    if assembly.task is not None:
        trained, files = assembly.task.finish(trained)
        model = with_language(export(trained), assembly.task.language)
    else:
        model = with_classes(export(trained), assembly.examples.classes)
    tested = _test_scores(model, assembly, stop)
    record = {"metrics": tested.metrics, **facts, **_provenance(assembly)}
    if tested.confusion is not None:
        record["confusion"] = tested.confusion.tolist()
    write_folder(folder / FOLDER, {MODEL: model, **files, METRICS: json.dumps(record, indent=1).encode()})
    return record


def _test_scores(model: bytes, assembly: TrainingSetup, stop: Callable[[], bool]) -> Scores:
    """The scores of the exported model on the test rows; no metrics if there are no such rows."""
    options, recipe, rows = assembly.learner.options, assembly.recipe, assembly.split.test
    with compile(model, threads=options.threads, cache_dir=options.cache_dir, tune="off") as session:
        if not len(rows):
            return Scores({})
        output = next(iter(session.outputs))

        def run(feeds: Mapping[str, Any]) -> dict[str, Any]:
            return session.run({name: feeds[name] for name in session.inputs})

        return compute_scores(run, assembly.examples, rows, recipe.batch, output, stop)


def _provenance(assembly: TrainingSetup) -> dict[str, Any]:
    """The provenance of a model: split, classes, digest of the data, seed and version of Lathe."""
    examples, split = assembly.examples, assembly.split
    return {
        "rows": {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
        "classes": examples.classes,
        "data": examples.digest,
        "seed": assembly.recipe.seed,
        "version": code_version(),
    }
