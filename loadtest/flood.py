"""A flood of connections that say next to nothing: is a client that comes meanwhile served?"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from urllib.parse import quote

from loadtest.beside import beside
from loadtest.connection import Target
from loadtest.scenario import Options, Report

CONNECTIONS = 1000  # that the flood holds, or as many as the server lets it
SECONDS, EVERY = 10.0, 0.05  # how long, and how often somebody comes
PATIENCE = 5.0  # seconds for an answer


async def flood(options: Options, report: Report) -> None:
    """A thousand connections that say next to nothing and come again; a new client is served all the time."""
    target, path = Target(options.url), f"/v2/models/{quote(options.model)}"
    statuses, times = Counter[str](), list[float]()
    async with beside("loadtest.flooding", options.url, str(CONNECTIONS)):
        end = time.monotonic() + (options.seconds or SECONDS)
        while time.monotonic() < end:
            for asked in ("/v2/health/live", path):
                began = time.monotonic()
                statuses[await _status(target, asked)] += 1
                times.append((time.monotonic() - began) * 1e3)
            await asyncio.sleep(EVERY)
    measured = ", ".join(f"{count} times {status}" for status, count in statuses.most_common())
    measured += f"; {statistics.median(times):.1f} ms in the median, {max(times):.1f} ms at worst"
    report.promise("a client that connects is served all the time", set(statuses) == {"200"}, measured)


async def _status(target: Target, path: str) -> str:
    """Ask over a new connection; returns the status, or what happened in place of an answer."""
    try:
        answer = await asyncio.wait_for(target.ask("GET", path), PATIENCE)
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    return str(answer.status)
