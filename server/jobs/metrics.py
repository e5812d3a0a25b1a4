"""Prometheus metrics of jobs, computed from the register at each scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lathe.server.jobs.job import Job, JobState
from lathe.server.jobs.register import Register


class JobMetrics(Collector):
    """Whether jobs are accepted, jobs by state, longest wait, running time; ended jobs count until they are removed."""

    def __init__(self, register: Register) -> None:
        self._register = register

    def collect(self) -> Iterator[Metric]:
        jobs = [] if self._register.down_reason is not None else self._register.all()
        up = GaugeMetricFamily("lathe_jobs_up", "Whether jobs are taken", value=self._register.down_reason is None)
        states = GaugeMetricFamily("lathe_jobs", "Jobs by state", labels=("state",))
        counts = Counter(job.state for job in jobs)
        for state in JobState:
            states.add_metric((state.value,), counts[state])
        waiting = (time.time() - job.queued for job in jobs if job.state is JobState.QUEUED)
        longest = GaugeMetricFamily(
            "lathe_job_longest_wait_seconds", "How long a queued job has waited", value=max(waiting, default=0.0)
        )
        yield from (up, states, longest, _seconds(jobs))


def _seconds(jobs: list[Job]) -> Metric:
    family = CounterMetricFamily("lathe_job_seconds", "Seconds that listed jobs have run, by kind", labels=("kind",))
    seconds_by_kind: Counter[str] = Counter()
    for job in jobs:
        seconds_by_kind[job.order.kind] += job.ran  # type: ignore[assignment]
    for kind, seconds in sorted(seconds_by_kind.items()):
        family.add_metric((kind,), seconds)
    return family
