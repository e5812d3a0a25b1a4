"""Scenario: versions are switched, uploaded and rolled back during traffic, and every answer is checked."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from loadtest import arrivals
from loadtest.admin import Admin, Timed, difference, random_inputs
from loadtest.scenario import INPUT_SETS, Options, Report, Traffic
from loadtest.stats import summarise
from loadtest.version_oracle import Moves, Oracle, Outputs, reference_outputs, variant

MODEL = "loadtest-rollback"
PAUSE = 0.05  # seconds between switches, so that requests meet both versions
ROLLBACK_MS = 50.0
LONGEST = 900.0  # seconds of schedule; it is cut when the switches are done


@dataclass
class Switcher:
    """Moves the live alias of one model and reports each move to the oracle."""

    admin: Admin
    oracle: Oracle
    base: bytes
    inputs: list[Outputs]
    report: Report

    async def upload(self) -> int:
        """Upload a version with distinct output values, and return its number when it is live.

        RuntimeError if the server gives it another number than the next one.
        """
        version = max(self.oracle.expected, default=0) + 1
        model = variant(self.base, 1 + version / 8)
        self.oracle.expected[version] = reference_outputs(model, self.inputs)
        done = await self._move("upload", version, lambda: self.admin.upload(model))
        if int(done.result["version"]) != version:
            raise RuntimeError(f"upload: expected version {version}, the server made {done.result['version']}")
        return version

    async def set_alias(self, version: int) -> None:
        await self._move("alias", version, lambda: self.admin.set_alias(version))

    async def rollback(self, expected: int) -> None:
        done = await self._move("rollback", expected, self.admin.rollback)
        if int(done.result["version"]) != expected:
            raise RuntimeError(f"rollback: expected version {expected}, the server went to {done.result['version']}")

    async def _move(self, kind: str, version: int, call: Callable[[], Awaitable[Timed]]) -> Timed:
        self.oracle.moves.start(version, time.monotonic())
        done = await call()
        self.oracle.moves.acknowledge(time.monotonic())
        self.report.calls_ms.setdefault(kind, []).append(done.ms)
        return done


async def rollback(options: Options, report: Report) -> None:
    """100 switches between two loaded versions, then 10 cycles of upload, compile, promote, roll back, under load."""
    traffic, switcher = await prepare(options, report)
    rate = options.rate or 1000.0
    before = await traffic.admin.batches()
    loop = traffic.loop(arrivals.poisson(rate, LONGEST), switcher.oracle.check)
    running = asyncio.create_task(loop.run())
    try:
        await switch(switcher, options)
        while loop.due_count < options.requests:
            await asyncio.sleep(0.1)
    finally:
        loop.stop()
        log = await running
    batches = difference(await traffic.admin.batches(), before)
    report.phases.append(summarise(f"{rate:g}/s while switching", log, float(log.due[-1]), batches))
    check_promises(switcher, options)


async def prepare(options: Options, report: Report) -> tuple[Traffic, Switcher]:
    """Upload the version that the scenario starts from. Returns the traffic of its model, and the switcher."""
    base = await asyncio.to_thread(Path(options.onnx).read_bytes)
    admin = Admin.at(options.url, MODEL)
    first = await admin.upload(base)
    inputs = [random_inputs(await admin.metadata(), options.rows, seed) for seed in range(INPUT_SETS)]
    version = int(first.result["version"])
    oracle = Oracle(Moves([version]), {version: reference_outputs(base, inputs)})
    return await Traffic.of(options, MODEL), Switcher(admin, oracle, base, inputs, report)


async def switch(switcher: Switcher, options: Options) -> None:
    """Make all moves of the alias, while the traffic runs."""
    old = max(switcher.oracle.expected)
    new = await switcher.upload()
    for number in range(options.switches):
        await (switcher.set_alias(new) if number % 2 else switcher.rollback(old))
        await asyncio.sleep(PAUSE)
    for _ in range(options.cycles):
        live = switcher.oracle.moves.versions[-1]
        await switcher.upload()
        await asyncio.sleep(PAUSE)
        await switcher.rollback(live)
        await asyncio.sleep(PAUSE)


def check_promises(switcher: Switcher, options: Options) -> None:
    report, (phase,) = switcher.report, switcher.report.phases
    report.promise(f"{options.requests} requests or more", phase.sent >= options.requests, f"{phase.sent} sent")
    report.promise("no request fails or is refused", phase.accepted == phase.sent, f"{phase.accepted} accepted")
    unseen = set(switcher.oracle.expected) - set(switcher.oracle.seen)
    seen = f"{len(switcher.oracle.seen)} of {len(switcher.oracle.expected)} versions"
    report.promise("every version answered", not unseen, seen)
    median = statistics.median(report.calls_ms["rollback"])
    count = len(report.calls_ms["rollback"])
    report.promise(f"rollback within {ROLLBACK_MS:g} ms", median <= ROLLBACK_MS, f"median {median:.1f} ms of {count}")
