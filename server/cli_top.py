"""``lathe top``: what a server's models are doing, from two looks at its metrics."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from core.amounts import amount
from server.cli_models import silence
from server.connection import Connection, asks_server
from server.terminal import Interval, Rounds, console, looks

Version = tuple[str, str]  # model, version


@asks_server
def top(server: Connection, interval: Interval = 1.0, rounds: Rounds = None) -> None:
    """Show requests per second, latencies, batches and queues of each model, until Ctrl-C."""
    with server.client() as client, Live(console=console, auto_refresh=False) as display:
        before = read(client.metrics(), time.monotonic())
        for _ in looks(interval, rounds):
            now = read(client.metrics(), time.monotonic())
            silent = [Text(silence(model)) for model in client.models() if not model.ready]
            display.update(Group(table(now, before), *silent), refresh=True)
            before = now


@dataclass(slots=True)
class Page:
    """One version's counters at one time."""

    requests: float = 0.0
    failures: float = 0.0
    rows: float = 0.0
    executions: float = 0.0
    pending: float = 0.0
    memory: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)  # requests up to so many seconds


@dataclass(slots=True)
class Look:
    """All versions' counters at one time (monotonic seconds)."""

    at: float
    pages: Mapping[Version, Page]


_PLAIN = {  # counters as the parser names them
    "nv_inference_request_success_total": "requests",
    "nv_inference_request_failure_total": "failures",
    "nv_inference_count_total": "rows",
    "nv_inference_exec_count_total": "executions",
    "nv_inference_pending_request_count": "pending",
    "lathe_model_memory_bytes": "memory",
}


def read(exposition: str, at: float) -> Look:
    """Read the metrics that the server gave at a time."""
    pages: dict[Version, Page] = defaultdict(Page)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            page_of = (sample.labels.get("model", ""), sample.labels.get("version", ""))
            if sample.name in _PLAIN:
                page, name = pages[page_of], _PLAIN[sample.name]
                setattr(page, name, getattr(page, name) + sample.value)
            elif sample.name == "lathe_request_seconds_bucket":
                pages[page_of].buckets[float(sample.labels["le"])] = sample.value
    return Look(at, pages)


def table(now: Look, before: Look) -> Table:
    """Return what happened between two looks."""
    found = Table("model", "version", "requests/s", "failed/s", "p50", "p99", "rows/batch", "queue", "memory")
    seconds = now.at - before.at
    for (model, version), page in sorted(now.pages.items()):
        old = before.pages.get((model, version), Page())
        runs = page.executions - old.executions
        found.add_row(
            model,
            version,
            *activity(page, old, seconds),
            f"{(page.rows - old.rows) / runs:.1f}" if runs else "",
            f"{page.pending:.0f}",
            amount(page.memory) if page.memory else "not loaded",
        )
    return found


def activity(page: Page, old: Page, seconds: float) -> tuple[str, str, str, str]:
    """Return requests and failures per second, median and 99th percentile of a version between two looks."""
    counts = {bound: count - old.buckets.get(bound, 0.0) for bound, count in page.buckets.items()}
    return (
        f"{(page.requests - old.requests) / seconds:,.0f}",
        f"{(page.failures - old.failures) / seconds:,.0f}",
        _time(quantile(counts, 0.50)),
        _time(quantile(counts, 0.99)),
    )


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """The time below which this share of the requests lies; inside a bucket they count as spread evenly."""
    ordered = sorted(counts.items())
    wanted = share * ordered[-1][1] if ordered else 0.0
    if not wanted:
        return None
    return _interpolated(ordered, wanted)


def _interpolated(ordered: Iterable[tuple[float, float]], wanted: float) -> float:
    low = below = 0.0
    for bound, count in ordered:
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
