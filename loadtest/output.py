"""Writes a report to the terminal, a JSON file and an HTML page."""

from __future__ import annotations

import statistics
from pathlib import Path

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.html_report import cells, page
from loadtest.scenario import Report
from loadtest.stats import by_powers

COLUMNS = ("phase", "due/s", "done/s", "p50", "p90", "p99", "p99.9", "refused", "failed")


def show(report: Report, console: Console) -> None:
    """Print the figures, the batch sizes, the calls and the promises."""
    console.print(phases_table(report))
    for phase in report.phases:
        if phase.batches:
            sizes = "  ".join(f"{size}: {count}" for size, count in by_powers(phase.batches).items())
            console.print(f"[dim]{phase.name}: batches by size[/dim]  {sizes}")
        if phase.complaints:
            console.print(f"[red]{phase.name}: {phase.complaints}[/red]")
    if report.calls_ms:
        console.print(calls_table(report))
    for verdict in report.verdicts:
        mark = "[green]held  [/green]" if verdict.held else "[red]broken[/red]"
        console.print(f"{mark} {escape(verdict.promise)}: {escape(verdict.measured)}")


def phases_table(report: Report) -> Table:
    table = Table(title=f"{report.scenario}, latency in ms", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in report.phases:
        table.add_row(*cells(phase))
    return table


def calls_table(report: Report) -> Table:
    table = Table(title="control-plane calls, ms", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("call", "count", "median", "worst"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for kind, times in report.calls_ms.items():
        table.add_row(kind, str(len(times)), f"{statistics.median(times):.1f}", f"{max(times):.1f}")
    return table


def save(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write SCENARIO.json and SCENARIO.html, and return their paths. Figures that were not measured are null."""
    folder.mkdir(parents=True, exist_ok=True)
    data, html = folder / f"{report.scenario}.json", folder / f"{report.scenario}.html"
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    data.write_bytes(orjson.dumps(report, option=options))
    html.write_text(page(report))
    return data, html
