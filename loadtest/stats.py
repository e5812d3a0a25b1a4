"""Computes the reported figures from the log of all requests."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

UNANSWERED = 0  # the status of a request whose connection broke, or that was not answered in time
WRONG = -1  # the status of an accepted answer that the scenario's check refused


@dataclass
class Log:
    """One row per request; times in seconds of the monotonic clock, from the start of the run.

    `due` is the scheduled time, `taken` is when the generator took the request up, `sent` is when it was sent over a
    free connection, `done` is when its response was complete or its connection broke (NaN: never).
    """

    due: Floats
    taken: Floats
    sent: Floats
    done: Floats
    status: NDArray[np.int32]
    complaints: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(due: Floats) -> Log:
        blank = np.full(len(due), np.nan)
        return Log(due, blank.copy(), blank.copy(), blank.copy(), np.full(len(due), UNANSWERED, np.int32))

    def only(self, rows: NDArray[np.bool_]) -> Log:
        return Log(
            self.due[rows], self.taken[rows], self.sent[rows], self.done[rows], self.status[rows], self.complaints
        )

    @property
    def latency_ms(self) -> Floats:
        """Latency from the scheduled time, so that waiting inside the generator counts."""
        return np.asarray((self.done - self.due) * 1e3, np.float64)

    @property
    def accepted(self) -> NDArray[np.bool_]:
        return np.asarray(self.status == 200)

    @property
    def rejected(self) -> NDArray[np.bool_]:
        """Requests refused by admission control (503 or 429), which are not failures."""
        return np.asarray((self.status == 503) | (self.status == 429))


@dataclass(frozen=True)
class Latency:
    """Milliseconds; NaN where nothing was measured."""

    p50: float
    p90: float
    p99: float
    p999: float
    mean: float
    worst: float

    @staticmethod
    def none() -> Latency:
        return Latency(*[math.nan] * 6)

    @staticmethod
    def of(values_ms: Floats) -> Latency:
        if not len(values_ms):
            return Latency.none()
        p50, p90, p99, p999 = (percentile(values_ms, p) for p in (50, 90, 99, 99.9))
        return Latency(p50, p90, p99, p999, float(values_ms.mean()), float(values_ms.max()))


@dataclass(frozen=True)
class Phase:
    """The figures of one phase of a scenario."""

    name: str
    offered: float  # requests/s that were due
    seconds: float
    sent: int
    accepted: int
    rejected: int
    failed: int
    throughput: float  # accepted answers/s
    latency: Latency  # of accepted requests
    rejection: Latency  # of refused requests
    lateness_p99_ms: float  # lateness of the generator itself
    unconnected_p99_ms: float  # then the wait for a free connection, which the server causes
    batches: dict[int, int]  # batch size -> executions, as the server counted them
    curve: list[tuple[float, float]]  # (percentile, ms), for the plot
    timeline: list[tuple[float, float, float]]  # (second, answers/s, p99 ms)
    complaints: dict[str, int]


def by_powers(batches: dict[int, int]) -> dict[str, int]:
    """Executions by batch size, grouped as 1, 2, 3-4, 5-8, ..."""
    gathered: Counter[int] = Counter()
    for size, count in batches.items():
        gathered[(size - 1).bit_length()] += count
    names = {power: str(2**power) if power < 2 else f"{2 ** (power - 1) + 1}-{2**power}" for power in gathered}
    return {names[power]: gathered[power] for power in sorted(gathered)}


def percentile(values: Floats, p: float) -> float:
    """The smallest value that at least p percent of all values do not exceed (nearest rank, never interpolated)."""
    rank = max(1, math.ceil(p / 100 * len(values) - 1e-9))
    return float(np.partition(values, rank - 1)[rank - 1])


def curve(values: Floats) -> list[tuple[float, float]]:
    """Points (percentile, value) of the distribution, denser in the tail, up to the resolution of the sample."""
    if not len(values):
        return []
    nines = np.arange(0, math.log10(max(len(values), 2)) + 0.01, 0.1)
    return [(float(100 * (1 - 10**-n)), percentile(values, 100 * (1 - 10**-n))) for n in nines]


def timeline(log: Log, seconds: float, step: float = 1.0) -> list[tuple[float, float, float]]:
    """(second, accepted answers/s, p99 in ms) for every whole `step` of scheduled time that has answers."""
    due, latency = log.due[log.accepted], log.latency_ms[log.accepted]
    slots = (due // step).astype(int)
    found = ((s, latency[slots == s]) for s in range(int(seconds // step)))
    return [(s * step, len(ms) / step, percentile(ms, 99)) for s, ms in found if len(ms)]


def summarise(name: str, log: Log, seconds: float, batches: dict[int, int] | None = None) -> Phase:
    """The figures of `log`, whose requests were due within `seconds`."""
    accepted, rejected = log.accepted, log.rejected
    latency = log.latency_ms
    failed = ~accepted & ~rejected
    # a backlog is answered after the last arrival, so throughput counts the time until the last response
    span = max(seconds, float(np.nanmax(log.done, initial=0.0)))
    sent = ~np.isnan(log.sent)
    lateness, unconnected = (log.taken - log.due)[sent] * 1e3, (log.sent - log.taken)[sent] * 1e3
    return Phase(
        name=name,
        offered=len(log.due) / seconds,
        seconds=seconds,
        sent=int(sent.sum()),
        accepted=int(accepted.sum()),
        rejected=int(rejected.sum()),
        failed=int(failed.sum()),
        throughput=float(accepted.sum() / span),
        latency=Latency.of(latency[accepted]),
        rejection=Latency.of(latency[rejected]),
        lateness_p99_ms=percentile(lateness, 99) if len(lateness) else math.nan,
        unconnected_p99_ms=percentile(unconnected, 99) if len(unconnected) else math.nan,
        batches=batches or {},
        curve=curve(latency[accepted]),
        timeline=timeline(log, seconds),
        complaints=dict(Counter(map(describe, log.status[failed & (log.status != WRONG)])) + log.complaints),
    )


def describe(status: int) -> str:
    return "no answer" if status == UNANSWERED else f"HTTP {status}"
