"""`lathe top`: a live view of the traffic of each model, from the difference of two reads of `/metrics`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.models import not_ready_text
from lathe.server.cli.terminal import WIDE, Interval, Rounds, console, live_view, make_table, ticks

if TYPE_CHECKING:
    from lathe.server.client import Client

ACTIVITY = ("requests\n/s", "failed\n/s", "p50", "p99")  # headers of `activity_cells`
Version = tuple[str, str]  # model, version


@with_connection
def top(server: Connection, interval: Interval = 1.0, rounds: Rounds = None) -> None:
    """Show requests per second, latencies, batch sizes and queues of each model, until Ctrl-C."""
    with server.client() as client, live_view() as show:
        before = fetch_metrics(client)
        for _ in ticks(interval, rounds):
            now = fetch_metrics(client)
            unready = [Text(not_ready_text(model)) for model in client.models() if not model.ready]
            show(Group(traffic_table(now, before), *unready))
            before = now


@dataclass(slots=True)
class VersionCounters:
    """The counters of one version at one time."""

    requests: float = 0.0
    failures: float = 0.0
    rows: float = 0.0
    executions: float = 0.0
    pending: float = 0.0
    memory: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)  # latency bound in seconds -> number of requests below it


@dataclass(slots=True)
class MetricsSnapshot:
    """The counters of all versions at one time (`at` in monotonic seconds)."""

    at: float
    pages: Mapping[Version, VersionCounters]


_FIELD_OF = {  # sample names of prometheus_client's parser -> fields of VersionCounters
    "nv_inference_request_success_total": "requests",
    "nv_inference_request_failure_total": "failures",
    "nv_inference_count_total": "rows",
    "nv_inference_exec_count_total": "executions",
    "nv_inference_pending_request_count": "pending",
    "lathe_model_memory_bytes": "memory",
}


def fetch_metrics(client: Client) -> MetricsSnapshot:
    """Fetch the metrics of a server; raises ClientError, also for an answer that is no exposition."""
    from lathe.server.client import ClientError

    text = client.metrics()
    try:
        return parse_metrics(text, time.monotonic())
    except (ValueError, KeyError, IndexError) as error:
        raise ClientError(f"GET /metrics: expected metrics in Prometheus' text format, got {text[:60]!r}") from error


def parse_metrics(exposition: str, at: float) -> MetricsSnapshot:
    """Parse a Prometheus exposition that was fetched at the time `at`."""
    from prometheus_client.parser import text_string_to_metric_families

    pages: dict[Version, VersionCounters] = defaultdict(VersionCounters)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            version = (sample.labels.get("model", ""), sample.labels.get("version", ""))
            if sample.name in _FIELD_OF:
                page, name = pages[version], _FIELD_OF[sample.name]
                setattr(page, name, getattr(page, name) + sample.value)
            elif sample.name == "lathe_request_seconds_bucket":
                pages[version].buckets[float(sample.labels["le"])] = sample.value
    return MetricsSnapshot(at, pages)


def traffic_table(now: MetricsSnapshot, before: MetricsSnapshot) -> Table:
    """Return the traffic of each version between two reads, one row each."""
    seconds, is_wide = now.at - before.at, console.width >= WIDE
    memory = ("memory",) if is_wide else ()
    table = make_table("model", "version", *ACTIVITY, "rows\n/batch", "queue", *memory)
    for (model, version), page in sorted(now.pages.items()):
        old = before.pages.get((model, version), VersionCounters())
        runs = page.executions - old.executions
        batch = f"{(page.rows - old.rows) / runs:.1f}" if runs else ""
        used = (format_bytes(page.memory) if page.memory else "not loaded",) if is_wide else ()
        table.add_row(model, version, *activity_cells(page, old, seconds), batch, f"{page.pending:.0f}", *used)
    return table


def activity_cells(page: VersionCounters, old: VersionCounters, seconds: float) -> tuple[str, str, str, str]:
    """Return four table cells: requests and failures per second, median and 99th percentile latency of a version.

    They are computed from the difference of two reads, `seconds` apart.
    """
    counts = {bound: count - old.buckets.get(bound, 0.0) for bound, count in page.buckets.items()}
    return (
        f"{(page.requests - old.requests) / seconds:,.0f}",
        f"{(page.failures - old.failures) / seconds:,.0f}",
        _format_seconds(quantile(counts, 0.50)),
        _format_seconds(quantile(counts, 0.99)),
    )


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Return the latency in seconds below which this share of the requests lies, None without requests.

    `counts` maps bucket bounds to cumulative counts; inside a bucket the requests count as spread evenly, as in
    Prometheus' histogram_quantile.
    """
    ordered = sorted(counts.items())
    wanted = share * ordered[-1][1] if ordered else 0.0
    if not wanted:
        return None
    return _interpolate(ordered, wanted)


def _interpolate(ordered: Iterable[tuple[float, float]], wanted: float) -> float:
    low = below = 0.0
    for bound, count in ordered:
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
