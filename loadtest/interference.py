"""Interference tests: alternating windows of the same traffic, with and without a disturbance.

Both kinds of window see the same machine within seconds of each other. The figure is the median of the ratios of
neighbouring windows.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from loadtest import arrivals
from loadtest.background_process import background_process
from loadtest.openloop import capacity
from loadtest.scenario import Options, Report, Traffic

WINDOWS = 5  # of each kind
SECONDS, SHARE = 4.0, 0.3  # length of a window; share of the capacity that the traffic uses
SLOW, SLOW_RATIO = 500, 1.2
LOADING_MODEL, LOADING_RATIO = "loadtest-loading", 1.5  # for two busy cores; it is 1.2 with a spare core

Disturbance = Callable[[], AbstractAsyncContextManager[object]]


async def measure_interference(
    options: Options, report: Report, what: str, disturbance: Disturbance, limit: float
) -> None:
    """Promise that the median of (p99 with the disturbance / p99 without it) is at most `limit`."""
    seconds = options.seconds or SECONDS
    traffic = await Traffic.of(options, options.model)
    rate = options.rate or SHARE * await capacity(traffic.admin.target, traffic.requests, options.connections, seconds)
    ratios = []
    for number in range(WINDOWS):
        quiet = await traffic.phase("quiet", arrivals.poisson(rate, seconds, 2 * number), seconds)
        async with disturbance():
            loud = await traffic.phase(what, arrivals.poisson(rate, seconds, 2 * number + 1), seconds)
        report.phases += [quiet, loud]
        ratios.append(loud.latency.p99 / quiet.latency.p99)
    measured = f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)}) at {rate:.0f}/s"
    late = max(phase.lateness_p99_ms for phase in report.phases)
    measured += f", the generator's own lateness at most {late:.1f} ms (p99 of a window)"
    report.promise(f"p99 with {what} at most {limit:g} of that without", statistics.median(ratios) <= limit, measured)
    report.promise_no_failures()


async def slow(options: Options, report: Report) -> None:
    """500 slow clients during normal traffic: silent, or sending a head or body, or reading, one byte per second."""

    def clients() -> AbstractAsyncContextManager[object]:
        return background_process("loadtest.slow_clients", options.url, options.model, str(SLOW))

    await measure_interference(options, report, f"{SLOW} slow clients", clients, SLOW_RATIO)


async def loading(options: Options, report: Report) -> None:
    """Versions of another model during normal traffic: each is parsed, compiled, loaded, warmed up and made live."""
    counts: list[int] = []

    @asynccontextmanager
    async def uploads() -> AsyncIterator[None]:
        async with background_process("loadtest.uploads", options.url, LOADING_MODEL, options.onnx) as work:
            yield
        counts.append(work.done)

    await measure_interference(options, report, "another model loading", uploads, LOADING_RATIO)
    report.promise("versions go live meanwhile", sum(counts) > 0, f"{sum(counts)} in {len(counts)} windows")
