from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from lathe.core.drawing.charts import Axis, nice_step
from loadtest.html_report import page
from loadtest.output import save, show
from loadtest.scenario import Report
from loadtest.stats import Log, summarise
from loadtest.wrk import as_phase, lua_headers, parse_wrk


@pytest.fixture
def report() -> Report:
    log = Log.of(np.linspace(0, 2.9, 300))
    log.taken[:] = log.sent[:] = log.due
    log.done[:] = log.due + np.linspace(0.001, 0.02, 300)
    log.status[:] = 200
    made = Report("steady", {"url": "http://h:1", "rate": 100.0, "seconds": None})
    made.phases = [summarise("<100/s>", log, 3.0, {1: 200, 5: 4, 8: 12})]
    made.calls_ms = {"rollback": [1.0, 3.0, 200.0]}
    made.promise("no request fails", True, "0 of 300 failed")
    return made


def test_the_page_is_well_formed_and_loads_nothing(report: Report) -> None:
    html = page(report)
    drawings = re.findall(r'<svg viewBox="0 0 640.*?</svg>', html, re.DOTALL)
    assert len(drawings) == 5  # distribution, answers/s, p99, batches, calls
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert not re.search(r"<script|<link|src=|@import|url\(", html)
    assert "&lt;100/s&gt;" in html
    assert "<100/s>" not in html


def test_plots_stay_inside_their_frame(report: Report) -> None:
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', page(report)))):
        assert 0 <= float(x) <= 640
        assert 0 <= float(y) <= 300


def test_saved_json_holds_every_figure(report: Report, tmp_path: Path) -> None:
    data, html = save(report, tmp_path / "new")
    loaded = json.loads(data.read_text())
    assert loaded["phases"][0]["latency"]["p50"] == pytest.approx(report.phases[0].latency.p50)
    assert loaded["phases"][0]["batches"] == {"1": 200, "5": 4, "8": 12}
    assert loaded["calls_ms"]["rollback"] == [1.0, 3.0, 200.0]
    assert loaded["verdicts"] == [{"promise": "no request fails", "held": True, "measured": "0 of 300 failed"}]
    assert html.read_text() == page(report)


def test_a_figure_that_was_not_measured_is_null(report: Report, tmp_path: Path) -> None:
    report.phases = [replace(report.phases[0], offered=math.nan)]
    assert json.loads(save(report, tmp_path)[0].read_text())["phases"][0]["offered"] is None


def test_the_terminal_shows_figures_batches_calls_and_promises(report: Report) -> None:
    report.promise("rollback within 50 ms", False, "median 60.0 ms")
    console = Console(record=True, width=140, file=io.StringIO())
    show(report, console)
    text = console.export_text()
    assert "1: 200  5-8: 16" in text
    assert re.search(r"rollback\s.*3\s.*3\.0\s.*200\.0", text)
    assert "broken rollback within 50 ms: median 60.0 ms" in text
    assert not report.held


@pytest.mark.parametrize(("rough", "nice"), [(0.7, 1), (1.0, 1), (1.1, 2), (3, 5), (7, 10), (0.03, 0.05), (0, 1)])
def test_nice_steps(rough: float, nice: float) -> None:
    assert nice_step(rough) == pytest.approx(nice)


def test_an_axis_covers_its_values() -> None:
    linear, decades = Axis.linear("ms", [3, 97]), Axis.decades("ms", [0.02, 30])
    assert (linear.low, linear.high) == (0, 100)
    assert (decades.low, decades.high) == (0.01, 100)
    assert decades.place(1) == pytest.approx(0.5)


WRK = """Running 1s test
RESULT {"requests": 9000, "us": 1000000, "broken": 1, "refused": 2, "p50": 500, "p90": 700, "p99": 2000, "p999": 4000, "mean": 510, "worst": 9000}
"""  # noqa: E501


def test_wrk_output_becomes_a_phase() -> None:
    phase = as_phase(parse_wrk(WRK), 8, {4: 2})
    assert (phase.sent, phase.failed, phase.throughput) == (9000, 3, 8997)
    assert (phase.latency.p50, phase.latency.p999) == (0.5, 4.0)


def test_wrk_output_without_figures_is_an_error_that_quotes_it() -> None:
    with pytest.raises(RuntimeError, match="unable to connect"):
        parse_wrk("unable to connect to 127.0.0.1:1")


def test_wrk_gets_the_headers_that_it_does_not_set_itself() -> None:
    script = lua_headers(["Host: h", "Inference-Header-Content-Length: 9", "Content-Length: 20"])
    assert script == 'wrk.headers["Inference-Header-Content-Length"] = "9"'
