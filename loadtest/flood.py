"""Scenario: a flood of nearly silent connections; a new client must still be served."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from urllib.parse import quote

from loadtest.background_process import background_process
from loadtest.connection import Target
from loadtest.scenario import Options, Report

CONNECTIONS = 1000  # the most that the flood holds open
SECONDS, EVERY = 10.0, 0.05  # length of the test; time between two new clients
PATIENCE = 5.0  # seconds for an answer


async def flood(options: Options, report: Report) -> None:
    """1000 nearly silent connections that reconnect when dropped; new clients must be served throughout."""
    target, path = Target(options.url), f"/v2/models/{quote(options.model)}"
    statuses, times = Counter[str](), list[float]()
    async with background_process("loadtest.flooding", options.url, str(CONNECTIONS)):
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
    """The HTTP status of a request over a new connection, or the name of the exception."""
    try:
        answer = await asyncio.wait_for(target.ask("GET", path), PATIENCE)
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    return str(answer.status)
