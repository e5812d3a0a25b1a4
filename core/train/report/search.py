"""What the report of a search says above that of its best trial: what was tried, what it was worth, what mattered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from core import charts
from core.charts import Axis, Line, figure, table

_ROWS = 200  # of the table: the best trials
_CURVES = 5  # trials whose epochs are drawn

Trials = Sequence[Mapping[str, Any]]  # of metrics.json: trial, state, merit, values


def section(search: Mapping[str, Any], merits: Mapping[int, Mapping[int, float]]) -> str:
    """HTML out of what metrics.json says of a search, and the merits of its trials by epoch."""
    trials = sorted(search["trials"], key=_rank)
    drawn = [trial["trial"] for trial in trials[:_CURVES] if merits.get(trial["trial"])]
    plots = [figure("Best so far", _best_so_far(search["trials"]))]
    if any(len(merits[number]) > 1 for number in drawn):
        plots.append(figure("The best trials by epoch", _curves([(f"trial {n}", _points(merits[n])) for n in drawn])))
    importance = [(path, f"{share:.0%}") for path, share in search["importance"].items()]
    parts = [f'<div class="plots">{"".join(plots)}</div>']
    if importance:
        parts.append(figure("What mattered", table(("setting", "share"), importance)))
    left_out = len(trials) - _ROWS
    title = f"The best {_ROWS} of {len(trials)} trials" if left_out > 0 else f"{len(trials)} trials"
    parts.append(figure(title, _table(trials[:_ROWS])))
    return "\n".join(parts)


def _rank(trial: Mapping[str, Any]) -> tuple[bool, float, int]:
    """Complete trials come first, the best of them before others."""
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
            "" if trial["merit"] is None else charts.number(trial["merit"]),
            *(_setting(trial["values"][path]) for path in paths),
        )
        for trial in trials
    ]
    return table(("trial", "state", "merit", *paths), rows)


def _setting(value: Any) -> str:
    return charts.number(value) if isinstance(value, float) else json.dumps(value)
