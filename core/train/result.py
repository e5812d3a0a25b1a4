"""The result of a training: the model as ONNX and what it is worth, in a folder that appears in one step.

result/model.onnx       what was trained, exported
result/metrics.json     of the held-out rows, by the exported model compiled for serving; and where it all came from
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from core.compiler import compile
from core.frontends.export import export
from core.ir.graph import Graph
from core.train.assembly import Assembly
from core.train.durable import write_folder
from core.train.parent import with_classes
from core.train.scores import Scores, scores

FOLDER = "result"
MODEL, METRICS = "model.onnx", "metrics.json"


def code_version() -> str:
    """The version of Lathe that runs."""
    try:
        return version("lathe")
    except PackageNotFoundError:
        return "unknown"


def read_metrics(folder: Path) -> dict[str, Any]:
    """The record of a training that has a result."""
    found: dict[str, Any] = json.loads((folder / FOLDER / METRICS).read_bytes())
    return found


def write_result(
    folder: Path, assembly: Assembly, trained: Graph, facts: Mapping[str, Any], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Export, compile, judge, write down; returns what metrics.json holds. `facts` go into it as well.

    Stopped when `stop` says so; OSError where there is no room. Neither leaves a result.
    """
    model = with_classes(export(trained), assembly.examples.classes)
    judged = _judged(model, assembly, stop)
    record = {"metrics": judged.metrics, **facts, **_lineage(assembly)}
    if judged.confusion is not None:
        record["confusion"] = judged.confusion.tolist()
    write_folder(folder / FOLDER, {MODEL: model, METRICS: json.dumps(record, indent=1).encode()})
    return record


def _judged(model: bytes, assembly: Assembly, stop: Callable[[], bool]) -> Scores:
    """What the exported model is worth on the held-out rows."""
    options, recipe, rows = assembly.learner.options, assembly.recipe, assembly.split.test
    with compile(model, threads=options.threads, cache_dir=options.cache_dir, tune="off") as session:
        if not len(rows):
            return Scores({})
        output = next(iter(session.outputs))

        def run(feeds: Mapping[str, Any]) -> dict[str, Any]:
            return session.run({name: feeds[name] for name in session.inputs})

        return scores(run, assembly.examples, rows, recipe.batch, output, stop)


def _lineage(assembly: Assembly) -> dict[str, Any]:
    """Where a model comes from."""
    examples, split = assembly.examples, assembly.split
    return {
        "rows": {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
        "classes": examples.classes,
        "data": examples.digest,
        "seed": assembly.recipe.seed,
        "version": code_version(),
    }
