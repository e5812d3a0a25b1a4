"""Windows of the same traffic in turns, with something going on beside it and without: what does it cost the others?

Both kinds of window see the same machine within seconds of each other; the figure is the median of the ratios of
neighbours.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from loadtest import arrivals
from loadtest.beside import beside
from loadtest.openloop import capacity
from loadtest.scenario import Options, Report, Traffic

WINDOWS = 5  # of each kind
SECONDS, SHARE = 4.0, 0.3  # of a window, and of the capacity that the traffic asks for
SLOW, SLOW_RATIO = 500, 1.2
LOADING_MODEL, LOADING_RATIO = "loadtest-loading", 1.5  # on two busy cores; with a core to spare it is 1.2

Disturbance = Callable[[], AbstractAsyncContextManager[object]]


async def disturbed(options: Options, report: Report, what: str, disturbance: Disturbance, limit: float) -> None:
    """Promise that the median ratio of the 99th percentiles, with the disturbance over without, stays below `limit`."""
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
    measured += f", the generator itself late by at most {late:.1f} ms in a window's p99"
    report.promise(f"p99 with {what} at most {limit:g} of that without", statistics.median(ratios) <= limit, measured)
    report.promise_no_failures()


async def slow(options: Options, report: Report) -> None:
    """Five hundred clients beside ordinary traffic: silent, or sending a head or body, or reading, a byte a second."""

    def clients() -> AbstractAsyncContextManager[object]:
        return beside("loadtest.slow_clients", options.url, options.model, str(SLOW))

    await disturbed(options, report, f"{SLOW} slow clients", clients, SLOW_RATIO)


async def loading(options: Options, report: Report) -> None:
    """Another model comes, version after version: parsed, compiled, loaded, warmed up and made live."""
    counts: list[int] = []

    @asynccontextmanager
    async def uploads() -> AsyncIterator[None]:
        async with beside("loadtest.uploads", options.url, LOADING_MODEL, options.onnx) as work:
            yield
        counts.append(work.done)

    await disturbed(options, report, "another model loading", uploads, LOADING_RATIO)
    report.promise("versions go live meanwhile", sum(counts) > 0, f"{sum(counts)} in {len(counts)} windows")
