"""Windows of the same traffic in turns, with something going on beside it and without: what does it cost the others?

Both kinds of window see the same machine within seconds of each other; the figure is the median of the ratios of
neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from loadtest import arrivals
from loadtest.admin import Admin
from loadtest.connection import Target
from loadtest.openloop import capacity
from loadtest.scenario import Options, Report, Traffic
from loadtest.switching import variant

WINDOWS = 5  # of each kind
SECONDS, SHARE = 4.0, 0.3  # of a window, and of the capacity that the traffic asks for
SLOW, SLOW_RATIO = 500, 1.2
LOADING_MODEL, LOADING_RATIO = "loadtest-loading", 1.5  # on two busy cores; with a core to spare it is 1.2
TRICKLE = 1.0  # seconds between two bytes

Disturbance = Callable[[], AbstractAsyncContextManager[None]]


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
    report.promise(f"p99 with {what} at most {limit:g} of that without", statistics.median(ratios) <= limit, measured)
    report.promise_no_failures()


async def slow(options: Options, report: Report) -> None:
    """Five hundred clients that say nothing, or one byte a second, beside ordinary traffic."""
    target = Target(options.url)
    await disturbed(options, report, f"{SLOW} slow clients", lambda: slow_clients(target, options.model), SLOW_RATIO)


async def loading(options: Options, report: Report) -> None:
    """Another model comes, version after version: parsed, compiled, loaded, warmed up and made live."""
    base = await asyncio.to_thread(Path(options.onnx).read_bytes)
    admin, factors = Admin.at(options.url, LOADING_MODEL), (1 + i / 1000 for i in itertools.count())

    @asynccontextmanager
    async def uploads() -> AsyncIterator[None]:
        task = asyncio.create_task(_upload(admin, base, factors))
        try:
            yield
            if task.done():
                task.result()  # raises what ended it
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await disturbed(options, report, "another model loading", uploads, LOADING_RATIO)


async def _upload(admin: Admin, base: bytes, factors: Iterator[float]) -> None:
    while True:
        await admin.upload(await asyncio.to_thread(variant, base, next(factors)))


@asynccontextmanager
async def slow_clients(target: Target, model: str) -> AsyncIterator[None]:
    """Half of them silent, half in the middle of a request's head; whom the server drops comes again."""
    head = f"POST /v2/models/{quote(model)}/infer HTTP/1.1\r\nhost: {target.authority}\r\nx-slow: ".encode()
    tasks = [asyncio.create_task(_dawdle(target, head if i % 2 else b"")) for i in range(SLOW)]
    await asyncio.sleep(TRICKLE)  # until they are all connected
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _dawdle(target: Target, head: bytes) -> None:
    """One slow client. Without a `head` it never says anything."""
    while True:
        with contextlib.suppress(OSError):
            await _one_visit(target, head)
        await asyncio.sleep(TRICKLE)


async def _one_visit(target: Target, head: bytes) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    dropped = asyncio.ensure_future(reader.read())
    try:
        writer.write(head)
        while not dropped.done():
            await asyncio.wait([dropped], timeout=TRICKLE)
            if head:
                writer.write(b"a")
    finally:
        dropped.cancel()
        writer.close()
