"""The report of a training: one HTML page with metrics, curves, confusion matrix, slowest operators and graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lathe.core.drawing import charts
from lathe.core.drawing.charts import Axis, figure, table
from lathe.core.drawing.graphs import draw
from lathe.core.frontends.onnx import load
from lathe.core.runtime.session.profile import OF_PEAK
from lathe.core.train.report.history import Curve, History, read_history
from lathe.core.train.report.operators import slowest_operators
from lathe.core.train.run.durable_files import write_file
from lathe.core.train.run.result import FOLDER, MODEL, read_metrics

FILE = "report.html"
_CLASSES_SHOWN = 40  # most classes of a confusion matrix that is drawn: a larger one is unreadable


def write(folder: Path, threads: int | None = None) -> Path:
    """Write the report of a finished training into its result folder, atomically; returns the report's path.

    Compiles the model and times its operators on `threads` threads, by default one per available CPU. OSError if a file
    cannot be read or written.
    """
    path = folder / FOLDER / FILE
    write_file(path, page(folder, slowest_operators((folder / FOLDER / MODEL).read_bytes(), threads=threads)).encode())
    return path


def page(folder: Path, operators: Sequence[Mapping[str, Any]] = (), opening: str = "") -> str:
    """The HTML document for the work folder of a training that has a result.

    `operators` are entries of `slowest_operators`. `opening` is HTML that comes first.
    """
    record, history = read_metrics(folder), read_history(folder)
    parts = [opening, _summary(record, history), _plots(history, record)]
    parts += [_operators(entry) for entry in operators]
    parts.append(figure("The model", draw(load((folder / FOLDER / MODEL).read_bytes()))))
    parts.append(figure("The recipe", f"<pre>{escape(_recipe(folder))}</pre>"))
    return charts.document("Training report", "\n".join(parts))


def _recipe(folder: Path) -> str:
    return json.dumps(json.loads((folder / "recipe.json").read_bytes()), indent=2)


def _summary(record: Mapping[str, Any], history: History) -> str:
    rows = ", ".join(f"{count} {part}" for part, count in record["rows"].items())
    facts = [
        ("rows", rows),
        ("training", f"{len(history.epochs)} epochs in {history.seconds:.1f} s"),
        ("interrupted", f"{history.resumed} times"),
        ("parameters", f"{history.started.get('parameters', '')}"),
        ("data", f"{record['data']}"),
        ("seed", f"{record['seed']}"),
        ("Lathe", f"{record['version']}"),
    ]
    metrics = [(name, charts.format_number(value)) for name, value in record["metrics"].items()]
    return table(("metrics on the test rows", ""), metrics) + table(("training", ""), facts)


def _plots(history: History, record: Mapping[str, Any]) -> str:
    losses = {"loss": history.train.get("loss", []), "validation": history.validation.get("loss", [])}
    charts_by_title = [("Loss", _curves("loss", losses))]
    charts_by_title += [
        (name, _curves(name, {name: curve})) for name, curve in history.validation.items() if name != "loss"
    ]
    rates = {
        "rate": ("Learning rate", "rate"), "rows_per_second": ("Throughput", "rows/s"),
        "loss_scale": ("Loss scale", "factor"),
    }  # fmt: skip
    charts_by_title += [
        (title, _curves(unit, {unit: history.train.get(name, [])})) for name, (title, unit) in rates.items()
    ]
    if "confusion" in record and len(record["confusion"]) <= _CLASSES_SHOWN:
        names = [str(name) for name in record["classes"]]
        charts_by_title.append(("Confusion matrix", charts.heatmap(record["confusion"], names, "predicted", "true")))
    plots = "\n".join(figure(title, drawing) for title, drawing in charts_by_title if drawing)
    return f'<div class="plots">\n{plots}\n</div>'


def _curves(label: str, curves: Mapping[str, Curve]) -> str:
    """A chart of curves over steps; empty if no curve has a point."""
    lines = [(name, curve) for name, curve in curves.items() if curve]
    if not lines:
        return ""
    steps = [step for _, curve in lines for step, _ in curve]
    values = [value for _, curve in lines for _, value in curve]
    low = min(values) if min(values) > 0.5 * max(values) else min(0.0, *values)
    return charts.curves(lines, Axis.linear("step", steps), Axis.linear(label, values, low))


def _operators(entry: Mapping[str, Any]) -> str:
    title = f"Slowest operators, batch {entry['batch']} ({entry['milliseconds']:.3g} ms)"
    rows = [
        (
            f"{operator['op']} → {', '.join(operator['outputs'])}",
            operator["kernel"],
            f"{operator['microseconds']:.1f}",
            f"{operator['share']:.1%}",
            f"{operator['gflops']:.1f}",
            f"{operator['of_peak']:.0%}",
        )
        for operator in entry["operators"]
    ]
    columns = ("operator", "kernel", "µs", "share", "GFLOP/s", "of peak")
    return figure(title, f"{table(columns, rows)}<p>{escape(OF_PEAK)}</p>")
