"""The section on a hyper-parameter search in the report: its trials, their merits, and the importance of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from lathe.core.drawing import charts
from lathe.core.drawing.charts import Axis, Line, figure, table

_ROWS = 200  # most trials in the table
_TIMES = "predicted_ms", "measured_ms"
_CURVES = 5  # most trials whose curves are drawn

Trials = Sequence[Mapping[str, Any]]  # of metrics.json: trial, state, merit, values


def search_section(search: Mapping[str, Any], merits: Mapping[int, Mapping[int, float]]) -> str:
    """The section on a search as HTML. `search` is the entry `sweep` of metrics.json.

    `merits` maps the number of a trial to its validation metric by epoch; higher is better.
    """
    trials = sorted(search["trials"], key=_rank)
    best = [trial["trial"] for trial in trials[:_CURVES] if merits.get(trial["trial"])]
    plots = [figure("Best so far", _best_so_far(search["trials"]))]
    if any(len(merits[number]) > 1 for number in best):
        plots.append(figure("The best trials by epoch", _curves([(f"trial {n}", _points(merits[n])) for n in best])))
    importance = [(path, f"{share:.0%}") for path, share in search["importance"].items()]
    parts = [f'<div class="plots">{"".join(plots)}</div>']
    if importance:
        parts.append(figure("Importance of settings", table(("setting", "share"), importance)))
    if "latency" in search:
        parts += _latency(search["latency"])
    left_out = len(trials) - _ROWS
    title = f"The best {_ROWS} of {len(trials)} trials" if left_out > 0 else f"{len(trials)} trials"
    parts.append(figure(title, _table(trials[:_ROWS])))
    return "\n".join(parts)


def _latency(latency: Mapping[str, Any]) -> list[str]:
    """The choice among the finalists, the measured trials, and the candidates that the prediction is fitted to."""
    finalists = [
        (
            f"{each['trial']}" + (" (chosen)" if each["trial"] == latency["chosen"] else ""),
            _number(each["predicted_ms"]),
            _number(each["measured_ms"]),
            _number(each["mean"]),
            _number(each["deviation"]),
            ", ".join([*map(charts.format_number, each["merits"]), *each["errors"]]),
        )
        for each in latency["finalists"]
    ]
    times = ("predicted, ms", "measured, ms")
    measured = [(f"{each['trial']}", *(_number(each[key]) for key in _TIMES)) for each in latency["measured"]]
    fitted = [tuple(_number(each[key]) for key in _TIMES) for each in latency["calibration"]]
    error = latency["prediction"]["error"]
    limit = f"at most {latency['limit_ms']:g} ms for {latency['batch']} rows on one thread"
    return [
        figure(f"Finalists: {limit}", table(("trial", *times, "mean merit", "deviation", "merits by seed"), finalists)),
        f"<p>{escape(latency['reason'])}.</p>",
        figure("Measured trials", table(("trial", *times), measured)),
        figure(f"Candidates that predictions are fitted to (median error {error:.0%})", table(times, fitted)),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else charts.format_number(value)


def _rank(trial: Mapping[str, Any]) -> tuple[bool, float, int]:
    """A sort key: complete trials first, then by merit, the best first and None last, then by number."""
    merit = trial["merit"]
    return trial["state"] != "complete", float("inf") if merit is None else -merit, trial["trial"]


def _best_so_far(trials: Trials) -> str:
    complete = [trial for trial in trials if trial["state"] == "complete" and trial["merit"] is not None]
    best = accumulate((trial["merit"] for trial in complete), max)
    return _curves([("merit", [(trial["trial"], merit) for trial, merit in zip(complete, best, strict=True)])], "trial")


def _points(merits: Mapping[int, float]) -> list[tuple[float, float]]:
    return sorted(merits.items())


def _curves(lines: Sequence[Line], label: str = "epoch") -> str:
    places = [place for _, points in lines for place, _ in points]
    merits = [merit for _, points in lines for _, merit in points]
    return charts.curves(lines, Axis.linear(label, places), Axis.linear("merit", merits, min(merits)))


def _table(trials: Trials) -> str:
    paths = list(trials[0]["values"])
    rows = [
        (
            f"{trial['trial']}",
            trial["state"],
            "" if trial["merit"] is None else charts.format_number(trial["merit"]),
            *(_setting(trial["values"][path]) for path in paths),
        )
        for trial in trials
    ]
    return table(("trial", "state", "merit", *paths), rows)


def _setting(value: Any) -> str:
    return charts.format_number(value) if isinstance(value, float) else json.dumps(value)
