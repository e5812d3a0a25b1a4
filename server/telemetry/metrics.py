"""Prometheus metrics: under Triton's names, for its dashboards, and Lathe's own histograms.

All values are read from the statistics at a scrape, so the data path counts only once, and counters survive the
unloading of a model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lathe.server.batching.cost_model import CostModel
from lathe.server.serving.servable import Servable
from lathe.server.telemetry.statistics import Statistics, StatsBook

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model", "version")
_TRITON: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("nv_inference_request_success", "Successful requests", lambda s: s.success.count),
    ("nv_inference_count", "Rows inferred", lambda s: s.inference_count),
    ("nv_inference_exec_count", "Executions of the model", lambda s: s.execution_count),
    ("nv_inference_request_duration_us", "Time of requests, end to end", lambda s: s.success.ns // 1000),
    ("nv_inference_queue_duration_us", "Time of requests in the queue", lambda s: s.queue.ns // 1000),
    ("nv_inference_compute_input_duration_us", "Time to stack inputs", lambda s: s.compute_input.ns // 1000),
    ("nv_inference_compute_infer_duration_us", "Time in the model", lambda s: s.compute_infer.ns // 1000),
    ("nv_inference_compute_output_duration_us", "Time to cut outputs", lambda s: s.compute_output.ns // 1000),
)

_COST: tuple[tuple[str, str, Callable[[CostModel], float]], ...] = (
    ("lathe_cost_fixed_seconds", "Time believed of any execution: a of a + b*n", lambda cost: cost.fixed),
    ("lathe_cost_work_seconds", "Time believed of each unit of work: b of a + b*n", lambda cost: cost.each),
    ("lathe_cost_stretch", "How many times as long an execution may well take", lambda cost: cost.bound_factor),
)


class Metrics:
    """Writes the Prometheus exposition."""

    def __init__(
        self, book: StatsBook, servables: Callable[[], Iterable[Servable]], collectors: Iterable[Collector] = ()
    ) -> None:
        self._book = book
        self._servables = servables
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        for collector in (_LatheCollector(book, servables), *collectors):
            self._registry.register(collector)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        lines = [*self._triton(), ""]
        return "\n".join(lines).encode() + generate_latest(self._registry)

    def _triton(self) -> Iterator[str]:
        """Yield Triton's metrics. Its counters have no suffix `_total`, which the client library would add."""
        pages = self._book.all()
        for name, text, value in _TRITON:
            yield from (f"# HELP {name} {text}", f"# TYPE {name} counter")
            yield from (f"{name}{_labels(page)} {value(page)}" for page in pages)
        for name, text, hits in (
            ("nv_cache_num_hits_per_model", "Requests answered from the cache", True),
            ("nv_cache_num_misses_per_model", "Requests that were not in the cache", False),
        ):
            yield from (f"# HELP {name} {text}", f"# TYPE {name} counter")
            yield from (f"{name}{_labels(p)} {(p.cache_hit if hits else p.cache_miss).count}" for p in pages)
        name = "nv_inference_request_failure"
        yield from (f"# HELP {name} Failed requests by reason", f"# TYPE {name} counter")
        for page in pages:
            yield from (f"{name}{_labels(page, reason=code)} {count}" for code, count in page.failures.items())
        name = "nv_inference_pending_request_count"
        yield from (f"# HELP {name} Requests waiting or running", f"# TYPE {name} gauge")
        yield from (f"{name}{_labels(servable.stats)} {servable.in_flight}" for servable in self._servables())
        name = "nv_model_load_duration_secs"
        yield from (f"# HELP {name} Time to load the model", f"# TYPE {name} gauge")
        yield from (f"{name}{_labels(page)} {page.load_seconds:g}" for page in pages if page.load_seconds)


def _labels(page: Statistics, **more: str) -> str:
    """Return the labels of a version as text: `{model="digits",version="3"}`.

    Nothing is escaped, since model names have no characters that need it.
    """
    labels = {"model": page.ref.name, "version": str(page.ref.version), **more}
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


class _LatheCollector(Collector):
    def __init__(self, book: StatsBook, servables: Callable[[], Iterable[Servable]]) -> None:
        self._book = book
        self._servables = servables

    def collect(self) -> Iterator[Metric]:
        request = HistogramMetricFamily("lathe_request_seconds", "Time from queue to outcome", labels=_LABELS)
        queue = HistogramMetricFamily("lathe_queue_seconds", "Time requests waited", labels=_LABELS)
        compute = HistogramMetricFamily("lathe_compute_seconds", "Time of executions", labels=_LABELS)
        step = HistogramMetricFamily("lathe_step_seconds", "Time of a pipeline's steps", labels=(*_LABELS, "step"))
        batch = HistogramMetricFamily("lathe_batch_rows", "Rows per execution", labels=_LABELS)
        tokens = CounterMetricFamily("lathe_packed_tokens", "Tokens that ran without padding", labels=_LABELS)
        work = CounterMetricFamily(
            "lathe_work", "Rows executed, times the other dimensions that vary; padding counts", labels=_LABELS
        )
        released = CounterMetricFamily(
            "lathe_batches_released", "Batches released, by reason", labels=(*_LABELS, "reason")
        )
        cancelled = CounterMetricFamily("lathe_requests_cancelled", "Requests whose caller left", labels=_LABELS)
        for page in self._book.all():
            labels = (page.ref.name, str(page.ref.version))
            request.add_metric(labels, page.request_times.cumulative(), page.request_times.total)
            queue.add_metric(labels, page.queue_times.cumulative(), page.queue_times.total)
            compute.add_metric(labels, page.compute_times.cumulative(), page.compute_times.total)
            batch.add_metric(labels, *_batch_sizes(page))
            cancelled.add_metric(labels, page.cancelled)
            tokens.add_metric(labels, page.packed_tokens)
            work.add_metric(labels, page.work)
            for name, times in page.steps.items():
                step.add_metric((*labels, name), times.cumulative(), times.total)
            for reason, count in page.released.items():
                released.add_metric((*labels, reason), count)
        threads = GaugeMetricFamily("lathe_threads", "Threads of the process, native ones too", value=_threads())
        memory = GaugeMetricFamily("lathe_model_memory_bytes", "Memory of loaded models", labels=_LABELS)
        for servable in self._servables():
            memory.add_metric((servable.ref.name, str(servable.ref.version)), servable.model.memory_bytes)
        yield from (request, queue, compute, step, batch, tokens, work, released, cancelled, memory, threads)
        yield from _costs(self._servables())


def _costs(servables: Iterable[Servable]) -> Iterator[Metric]:
    """Yield the cost model's parameters, for versions with enough measured executions."""
    known = [(servable.ref, servable.batcher.cost) for servable in servables]
    for name, text, value in _COST:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for ref, cost in known:
            if cost is not None and cost.is_trusted:
                family.add_metric((ref.name, str(ref.version)), value(cost))
        yield family


def _threads() -> int:
    """Return the number of threads of the process: by /proc on Linux, otherwise only those of Python."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _batch_sizes(page: Statistics) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets and the total number of rows.

    A bucket is its upper bound as text, and the number of executions whose rows do not exceed the bound. The bounds are
    powers of two up to 4096, then `+Inf`.
    """
    sizes = {size: stat.compute_infer.count for size, stat in page.batches.items()}
    bounds = [2**power for power in range(13)]
    buckets = [(str(bound), float(sum(n for size, n in sizes.items() if size <= bound))) for bound in bounds]
    return [*buckets, ("+Inf", float(sum(sizes.values())))], float(sum(size * n for size, n in sizes.items()))
