"""The counters and histograms of each version. Only the event loop's thread writes them, so they need no locks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from lathe.server.batching.execution import BatchResult
from lathe.server.types import ModelRef

LARGEST_SIZE = 4096  # rows; larger batches count as this size, since clients choose the rows of a pipeline's batches
BUCKETS = 28  # powers of two from 1 us to over two minutes


@dataclass(slots=True)
class Duration:
    """The number of occurrences of something, and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` occurrences that took `seconds` together."""
        self.count += count
        self.ns += int(seconds * 1e9)

    def describe(self) -> dict[str, int]:
        """Return the protocol's object: `count`, and `ns` (nanoseconds)."""
        return {"count": self.count, "ns": self.ns}


class Histogram:
    """Durations counted in buckets: the k-th (from 0) has those below `2**k` us and in no earlier bucket.

    The last bucket has all longer ones.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (BUCKETS + 1)
        self.total = 0.0  # seconds

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[min(int(seconds * 1e6).bit_length(), BUCKETS)] += 1
        self.total += seconds

    def add_all(self, durations: list[float]) -> None:
        """Count many durations."""
        if len(durations) == 1:
            self.add(durations[0])
            return
        counts, ordered, below = self.counts, sorted(durations), 0
        while below < len(ordered):  # durations of a batch fall into few buckets: bisect for the end of each
            power = min(int(ordered[below] * 1e6).bit_length(), BUCKETS)
            end = bisect_left(ordered, 2**power / 1e6, below + 1) if power < BUCKETS else len(ordered)
            counts[power] += end - below
            below = end
        self.total += sum(durations)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs of an upper bound (seconds, as text) and the count up to it; the last bound is `+Inf`."""
        pairs, running = [], 0
        for power, count in enumerate(self.counts[:-1]):
            running += count
            pairs.append((f"{2**power / 1e6:g}", float(running)))
        return [*pairs, ("+Inf", float(running + self.counts[-1]))]


@dataclass(slots=True)
class BatchStat:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class Statistics:
    """Counters of one version, in Triton's terms; durations count a batch once per request in it."""

    ref: ModelRef
    last_inference_ms: int = 0  # wall clock, since the epoch
    inference_count: int = 0  # rows
    execution_count: int = 0
    work: int = 0  # rows, or the product of all dynamic dimensions; padding counts
    packed_tokens: int = 0  # tokens of requests that ran packed
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStat] = field(default_factory=dict)
    request_times: Histogram = field(default_factory=Histogram)  # from queue to outcome
    queue_times: Histogram = field(default_factory=Histogram)
    compute_times: Histogram = field(default_factory=Histogram)
    released: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # batches by what limited their size
    failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by error code
    steps: dict[str, Histogram] = field(default_factory=dict)  # of a pipeline, from queue to outcome
    cancelled: int = 0
    load_seconds: float = 0.0  # of the latest load; set by the loader

    def ran(self, batch: BatchResult, waits: list[float], failed: int) -> None:
        """Record one batch. `waits`: the seconds that each request waited; `failed`: the number of failed requests."""
        requests = len(waits)
        whole = batch.scattered - batch.started
        self.execution_count += batch.executions
        self.packed_tokens += batch.tokens
        if failed:
            self.fail.add(whole * failed + sum(waits) * failed / requests, failed)
        good = requests - failed
        if good:
            self._count_successes(batch, waits, good)
        self.queue_times.add_all(waits)
        self.request_times.add_all([wait + whole for wait in waits])
        self.compute_times.add(batch.executed - batch.gathered)

    def _count_successes(self, batch: BatchResult, waits: list[float], good: int) -> None:
        waited = sum(waits) * good / len(waits)
        gathering, executing = batch.gathered - batch.started, batch.executed - batch.gathered
        scattering = batch.scattered - batch.executed
        self.inference_count += batch.rows
        self.success.add(waited + (batch.scattered - batch.started) * good, good)
        self.queue.add(waited, good)
        size = min(batch.rows, LARGEST_SIZE)
        stat = self.batches.get(size)
        if stat is None:
            stat = self.batches[size] = BatchStat()
        self.compute_input.add(gathering * good, good)
        self.compute_infer.add(executing * good, good)
        self.compute_output.add(scattering * good, good)
        stat.compute_input.add(gathering)
        stat.compute_infer.add(executing)
        stat.compute_output.add(scattering)

    def stepped(self, step: str, seconds: float) -> None:
        """Record the time of one step of a pipeline's request."""
        found = self.steps.get(step)
        if found is None:
            found = self.steps[step] = Histogram()
        found.add(seconds)

    def refused(self, code: str) -> None:
        """Count a request that was never executed, by the code of its error."""
        self.failures[code] += 1
        self.fail.count += 1

    def describe(self) -> dict[str, object]:
        """Return the protocol's `model_stats` object."""
        steps = (
            "success",
            "fail",
            "queue",
            "compute_input",
            "compute_infer",
            "compute_output",
            "cache_hit",
            "cache_miss",
        )
        return {
            "name": self.ref.name,
            "version": str(self.ref.version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {step: getattr(self, step).describe() for step in steps},
            "batch_stats": [_batch(size, stat) for size, stat in sorted(self.batches.items())],
        }


def _batch(size: int, stat: BatchStat) -> dict[str, object]:
    steps = ("compute_input", "compute_infer", "compute_output")
    return {"batch_size": size, **{step: getattr(stat, step).describe() for step in steps}}


class StatsBook:
    """The statistics of all versions; they are kept when a version is unloaded and loaded again."""

    def __init__(self) -> None:
        self._pages: dict[ModelRef, Statistics] = {}

    def of(self, ref: ModelRef) -> Statistics:
        """Return a version's statistics, the same object each time."""
        return self._pages.setdefault(ref, Statistics(ref))

    def forget(self, ref: ModelRef) -> None:
        """Drop a version's statistics, so that deleted versions do not add up."""
        self._pages.pop(ref, None)

    def all(self) -> list[Statistics]:
        """Return all statistics, sorted by name and version."""
        return [self._pages[ref] for ref in sorted(self._pages, key=lambda ref: (ref.name, ref.version))]
