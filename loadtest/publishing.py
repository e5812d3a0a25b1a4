"""Scenario: time from an upload until the version is live, on an idle server and on a busy one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np

from loadtest.admin import Admin
from loadtest.openloop import MANY
from loadtest.scenario import Options, Report, Traffic
from loadtest.stats import summarise
from loadtest.version_oracle import variant

MODEL = "loadtest-publishing"
TIMES = 7  # versions of each kind
LIMIT_MS = 10_000.0  # longest permitted publication under full load
BEFORE, PAUSE = 1.0, 0.2  # seconds of load before the first upload; seconds between two uploads
ENDLESS, LONGEST = 8 * MANY, 300.0  # requests and seconds: more than the scenario needs


async def publishing(options: Options, report: Report) -> None:
    """Versions are uploaded, compiled and promoted on an idle server, then on a fully loaded one."""
    base, admin = Path(options.onnx).read_bytes(), Admin.at(options.url, MODEL)
    await _publish(admin, base, report.calls_ms.setdefault("publish, idle", []))

    traffic = await Traffic.of(options, options.model)
    load = traffic.loop(np.zeros(ENDLESS))
    running = asyncio.create_task(load.run(patience=LONGEST))
    await asyncio.sleep(BEFORE)
    busy: list[float] = report.calls_ms.setdefault("publish, full load", [])
    await _publish(admin, base, busy)
    lasted = not running.done()
    load.stop()
    log = await running
    seconds = float(np.nanmax(log.done))
    report.phases.append(summarise("full load", log, seconds))
    report.promise(
        f"a publication within {LIMIT_MS / 1e3:g} s under full load", max(busy) <= LIMIT_MS, f"{max(busy):.0f} ms"
    )
    report.promise("the load lasts to the end", lasted, f"{seconds:.1f} s")
    report.promise_no_failures()


async def _publish(admin: Admin, base: bytes, times: list[float]) -> None:
    """Publish TIMES versions and append the milliseconds of each.

    Each version has distinct weights, so that no compiled code can be reused.
    """
    for _ in range(TIMES):
        done = await admin.upload(variant(base, random.uniform(1.0, 2.0)))
        times.append(done.ms)
        await asyncio.sleep(PAUSE)
