"""The report of a training: one page of HTML with its curves, metrics, confusions, operators and graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from core import charts
from core.charts import Axis, figure, table
from core.frontends.onnx import load
from core.picture import draw
from core.train.durable import write_file
from core.train.report.history import Curve, History, read_history
from core.train.report.operators import slowest
from core.train.result import FOLDER, MODEL, read_metrics

FILE = "report.html"
_CLASSES_SHOWN = 40  # a larger table of confusions cannot be read


def write(folder: Path, threads: int | None = None) -> Path:
    """Write the report of a finished training beside its result; the file is there whole or not at all.

    OSError where there is no room.
    """
    path = folder / FOLDER / FILE
    aside = path.with_suffix(".new")
    write_file(aside, page(folder, slowest((folder / FOLDER / MODEL).read_bytes(), threads=threads)).encode())
    aside.replace(path)
    return path


def page(folder: Path, operators: Sequence[Mapping[str, Any]] = (), opening: str = "") -> str:
    """The whole document, from a folder with a result. `opening` is HTML that stands before all else."""
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
        ("trained for", f"{len(history.epochs)} epochs in {history.seconds:.1f} s"),
        ("interrupted", f"{history.resumed} times"),
        ("parameters", f"{history.started.get('parameters', '')}"),
        ("data", f"{record['data']}"),
        ("seed", f"{record['seed']}"),
        ("Lathe", f"{record['version']}"),
    ]
    metrics = [(name, charts.number(value)) for name, value in record["metrics"].items()]
    return table(("on the held-out rows", ""), metrics) + table(("training", ""), facts)


def _plots(history: History, record: Mapping[str, Any]) -> str:
    losses = {"loss": history.train.get("loss", []), "validation": history.validation.get("loss", [])}
    shown = [("Loss", _curves("loss", losses))]
    shown += [(name, _curves(name, {name: curve})) for name, curve in history.validation.items() if name != "loss"]
    rates = {
        "rate": ("Learning rate", "rate"), "rows_per_second": ("Throughput", "rows/s"),
        "loss_scale": ("Loss scale", "factor"),
    }  # fmt: skip
    shown += [(title, _curves(unit, {unit: history.train.get(name, [])})) for name, (title, unit) in rates.items()]
    if "confusion" in record and len(record["confusion"]) <= _CLASSES_SHOWN:
        names = [str(name) for name in record["classes"]]
        shown.append(("Confusions", charts.heatmap(record["confusion"], names, "predicted", "true")))
    plots = "\n".join(figure(title, drawing) for title, drawing in shown if drawing)
    return f'<div class="plots">\n{plots}\n</div>'


def _curves(label: str, curves: Mapping[str, Curve]) -> str:
    """Curves over steps; nothing where there is no point."""
    lines = [(name, curve) for name, curve in curves.items() if curve]
    if not lines:
        return ""
    steps = [step for _, curve in lines for step, _ in curve]
    values = [value for _, curve in lines for _, value in curve]
    low = min(values) if min(values) > 0.5 * max(values) else min(0.0, *values)
    return charts.curves(lines, Axis.linear("step", steps), Axis.linear(label, values, low))


def _operators(entry: Mapping[str, Any]) -> str:
    title = f"Operators that take longest, batch {entry['batch']} ({entry['milliseconds']:.3g} ms)"
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
    return figure(title, table(("operator", "kernel", "µs", "share", "GFLOP/s", "of peak"), rows))
