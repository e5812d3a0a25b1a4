"""Writes the results of exported models into docs/measurements/models.md, between the marks of its table.

    python -m tests.exporters.table VERDICTS FIGURES --machine TEXT

VERDICTS is written by `python -m tests.exporters.corpus FOLDER --json`, FIGURES by
`python -m loadtest exported FOLDER --json`. MACHINE names the kind of CPU, the versions and the commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.exported import MAX_FIRST_RATIO, MIN_STEADY_RATIO, First, Steady
from loadtest.report_docs import markdown, replace_part
from tests.exporters.evaluation import Evaluation

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "models.md"
HEAD = ("model", "runs are shared", "without a kernel", "batch 1", "batch 8", "first runs")


def table(verdicts: Sequence[Evaluation], steady: Sequence[Steady], first: Sequence[First], machine: str) -> str:
    """The summary and a row for each model, as Markdown.

    Ratios are ONNX Runtime's time / Lathe's, so above 1 Lathe is faster. For first runs they are Lathe's time / ONNX
    Runtime's: the median and the largest of the model."""
    ahead = {(row.model, row.batch): row.ahead for row in steady}
    late: dict[str, list[float]] = {}
    for row in first:
        late.setdefault(row.model, []).append(row.ratio)
    rows = [_row(verdict, ahead, late.get(verdict.name, [])) for verdict in verdicts]
    parts = [machine, markdown(("line", "figure"), _lines(verdicts, steady, first)), markdown(HEAD, rows)]
    return "\n\n".join(parts)


def _lines(verdicts: Sequence[Evaluation], steady: Sequence[Steady], first: Sequence[First]) -> list[tuple[str, str]]:
    names = [verdict.name for verdict in verdicts]
    ran = [verdict for verdict in verdicts if verdict.result != "ORT no"]
    independent = [verdict for verdict in ran if verdict.independent]
    lines = [
        ("exported models, architectures", f"{len(names)}, {len({name.rpartition('.')[0] or name for name in names})}"),
        ("agree with ONNX Runtime", f"{sum(each.result == 'agrees' for each in ran)} of {len(ran)}"),
        ("refused by ONNX Runtime itself", str(len(verdicts) - len(ran))),
        (
            "rows are independent in ONNX Runtime, and batched here",
            f"{sum(each.batchable for each in independent)} of {len(independent)}",
        ),
        ("packed: sequences of different lengths share a run", str(sum(each.packable for each in ran))),
        ("every node has a kernel", f"{sum(not each.fallbacks for each in ran)} of {len(ran)}"),
    ]
    if ratios := [row.ahead for row in steady if row.batch in (1, 8)]:
        lines += [
            ("ONNX Runtime's time by Lathe's, geometric mean", f"{statistics.geometric_mean(ratios):.2f}"),
            (f"of {len(ratios)} cases below {MIN_STEADY_RATIO}; the lowest", f"{_below(ratios)}; {min(ratios):.2f}"),
        ]
    if times := [row.ratio for row in first]:
        lines += [
            ("first runs: Lathe's time by ONNX Runtime's, median", f"{statistics.median(times):.2f}"),
            (
                f"of {len(times)} first runs above {MAX_FIRST_RATIO:g}",
                str(sum(time > MAX_FIRST_RATIO for time in times)),
            ),
        ]
    return lines


def _below(ratios: Iterable[float]) -> int:
    return sum(ratio < MIN_STEADY_RATIO for ratio in ratios)


def _row(verdict: Evaluation, ahead: Mapping[tuple[str, int], float], late: Sequence[float]) -> list[str]:
    if verdict.result != "agrees":
        return [verdict.name, "ONNX Runtime refuses it" if verdict.result == "ORT no" else verdict.result, *[""] * 4]
    shared = "packed" if verdict.packable else "batched" if verdict.batchable else "alone"
    ratios = [f"{ahead[key]:.2f}" if (key := (verdict.name, batch)) in ahead else "" for batch in (1, 8)]
    times = f"{statistics.median(late):.2f}, {max(late):.2f}" if late else ""
    return [verdict.name, shared, str(len(verdict.fallbacks) or ""), *ratios, times]


def read_figures(path: Path) -> tuple[list[Steady], list[First]]:
    """The rows of `loadtest exported`."""
    found: dict[str, Any] = json.loads(path.read_text())
    return [Steady(**row) for row in found["steady"]], [First(**row) for row in found["first"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exporters.table", description=__doc__)
    parser.add_argument("verdicts", type=Path)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--machine", required=True, help="kind of CPU, versions and commit, for readers of the page")
    options = parser.parse_args(arguments)
    verdicts = [Evaluation(**json.loads(line)) for line in options.verdicts.read_text().splitlines()]
    text = table(verdicts, *read_figures(options.figures), options.machine)
    PAGE.write_text(replace_part(PAGE.read_text(), "exported", text))


if __name__ == "__main__":
    main()
