"""A report as one self-contained HTML page with inline plots."""

from __future__ import annotations

import math
from html import escape

from lathe.core.drawing.charts import Axis, Line, bars, curves, document, figure, table
from loadtest.scenario import Report
from loadtest.stats import Phase

TAIL = ((0.0, "0"), (1.0, "90"), (2.0, "99"), (3.0, "99.9"), (4.0, "99.99"), (5.0, "99.999"))  # nines -> percentile


def page(report: Report) -> str:
    """The whole document."""
    options = ", ".join(f"{k} {v}" for k, v in report.options.items() if v is not None)
    plots = "\n".join(figure(name, drawing) for name, drawing in drawings(report))
    tables = f"<p>{escape(options)}</p>\n{verdicts(report)}\n{phase_table(report.phases)}"
    return document(f"Load test: {report.scenario}", f'{tables}\n<div class="plots">\n{plots}\n</div>')


def verdicts(report: Report) -> str:
    rows = (
        f"<tr><td>{escape(v.promise)}</td><td>{escape(v.measured)}</td>"
        f'<td class="{"held" if v.held else "broken"}">{"held" if v.held else "broken"}</td></tr>'
        for v in report.verdicts
    )
    return f"<table><tr><th>promise</th><th>measured</th><th></th></tr>{''.join(rows)}</table>"


def phase_table(phases: list[Phase]) -> str:
    head = ("phase", "due/s", "done/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "refused", "failed")
    return table(head, map(cells, phases))


def cells(phase: Phase) -> list[str]:
    """A phase as a row of text, for the page and for the terminal."""
    latency = phase.latency
    figures = (phase.offered, phase.throughput, latency.p50, latency.p90, latency.p99, latency.p999)
    shown = ["-" if math.isnan(f) else f"{f:,.0f}" if f >= 1000 else f"{f:.3g}" for f in figures]
    return [phase.name, *shown, str(phase.rejected), str(phase.failed)]


def drawings(report: Report) -> list[tuple[str, str]]:
    """Every plot that the report has data for, with its title."""
    found = []
    if any(phase.curve for phase in report.phases):
        found.append(("Latency distribution, from the intended time of sending", latency_plot(report.phases)))
    if any(len(phase.timeline) > 1 for phase in report.phases):
        found.append(("Answers per second", timeline_plot(report.phases, "answers/s", 1)))
        found.append(("99th percentile, second by second", timeline_plot(report.phases, "ms", 2)))
    for phase in report.phases:
        if phase.batches:
            sizes = {str(size): float(count) for size, count in sorted(phase.batches.items())}
            found.append((f"Batches: {phase.name}", bars(sizes, "requests in a batch", "batches")))
    if report.calls_ms:
        found.append(("Control-plane calls under load", calls_plot(report.calls_ms)))
    return found


def latency_plot(phases: list[Phase]) -> str:
    lines: list[Line] = [(phase.name, [(nines(p), ms) for p, ms in phase.curve]) for phase in phases]
    last = math.ceil(max((x for _, points in lines for x, _ in points), default=1.0))
    x = Axis("percentile", 0, max(last, 1), ticks=[tick for tick in TAIL if tick[0] <= last])
    return curves(lines, x, Axis.decades("ms", values_of(lines)))


def nines(percentile: float) -> float:
    """The number of nines of a percentile (99 -> 2, 99.9 -> 3), an axis that spreads out the tail."""
    return -math.log10(max(1 - percentile / 100, 1e-9))


def timeline_plot(phases: list[Phase], label: str, column: int) -> str:
    """A figure over time, with the phases one after another."""
    lines: list[Line] = []
    begin = 0.0
    for phase in phases:
        lines.append((phase.name, [(begin + row[0], row[column]) for row in phase.timeline]))
        begin += phase.seconds
    return curves(lines, Axis.linear("seconds", [begin]), Axis.linear(label, values_of(lines)))


def calls_plot(calls: dict[str, list[float]]) -> str:
    lines: list[Line] = [(kind, list(enumerate(times, 1))) for kind, times in calls.items()]
    longest = max(len(times) for times in calls.values())
    x = Axis.linear("call", [longest])
    return curves(lines, x, Axis.decades("ms", values_of(lines)), dots=True)


def values_of(lines: list[Line]) -> list[float]:
    return [y for _, points in lines for _, y in points]
