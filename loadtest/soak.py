"""Scenario: the operations of a long-lived server, repeated; memory, descriptors and threads must not grow."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from loadtest import arrivals
from loadtest.admin import Admin
from loadtest.connection import Target
from loadtest.scenario import Options, Report, Traffic
from loadtest.stats import summarise
from loadtest.version_oracle import variant
from loadtest.wire import http_request

MODEL = "loadtest-soak"
SECONDS, RATE = 1800.0, 200.0
SETTLING = 0.25  # share of the time that is not counted: caches fill and allocators reach their size
SAMPLE = 2.0  # seconds between two samples of the gauges
PAUSE = 0.5  # seconds between two rounds of background operations
VERSIONS = 8  # versions that stay; older ones are deleted
MEMORY = 5.0  # MiB per hour that memory may grow
HANDLES = 2.0  # per hour that descriptors and threads may grow

GAUGES = {
    "process_resident_memory_bytes": ("resident memory", 2.0**-20, MEMORY, "MiB"),
    "process_open_fds": ("file descriptors", 1.0, HANDLES, ""),
    "lathe_threads": ("threads", 1.0, HANDLES, ""),
}


@dataclass
class Watch:
    """The server's gauges over time (seconds of the monotonic clock)."""

    target: Target
    times: list[float] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in GAUGES})

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE)

    async def look(self) -> None:
        text = (await self.target.ask("GET", "/metrics")).body.decode()
        found = dict(line.split(" ", 1) for line in text.splitlines() if line.split(" ", 1)[0] in GAUGES)
        self.times.append(time.monotonic())
        for name, samples in self.samples.items():
            samples.append(float(found[name]))


@dataclass
class BackgroundOperations:
    """Background operations during the traffic; every round does each of them once."""

    admin: Admin
    base: bytes
    report: Report
    versions: list[int] = field(default_factory=list)

    async def run(self) -> None:
        for number in itertools.count():
            await self.replace_version(number)
            await self.load_and_unload()
            await self.disconnect_early()
            await self.send_invalid_requests()
            await asyncio.sleep(PAUSE)

    async def replace_version(self, number: int) -> None:
        """Upload a version. From the second call on, roll back and make it live again.

        If more than VERSIONS are there, delete the oldest one.
        """
        done = await self.admin.upload(variant(self.base, 1 + number % 997 / 1000))
        self.report.calls_ms.setdefault("upload", []).append(done.ms)
        self.versions.append(int(done.result["version"]))
        if len(self.versions) > 1:
            await self.admin.rollback()
            await self.admin.set_alias(self.versions[-1])
        if len(self.versions) > VERSIONS:
            await self.expect("DELETE", f"/api/v1/models/{MODEL}/versions/{self.versions.pop(0)}", 200)

    async def load_and_unload(self) -> None:
        await self.expect("POST", f"/v2/repository/models/{MODEL}/unload", 200)
        await self.expect("POST", f"/v2/repository/models/{MODEL}/load", 200)

    async def disconnect_early(self) -> None:
        """Clients that disconnect in the middle of a request, and before its response."""
        whole = http_request("POST", f"/v2/models/{MODEL}/infer", self.admin.target.authority, b"{}")
        for request in (whole[: len(whole) // 2], whole):
            for _ in range(5):
                connection = await self.admin.target.connect()
                connection.send(request, lambda *_: None)
                await asyncio.sleep(0)
                connection.close()

    async def send_invalid_requests(self) -> None:
        for path, body, status in invalid_requests():
            await self.expect("POST", path, status, body)

    async def expect(self, method: str, path: str, status: int, body: bytes = b"") -> None:
        answer = await self.admin.target.ask(method, path, body)
        if answer.status != status:
            raise RuntimeError(f"{method} {path}: expected {status}, got {answer.status}: {answer.body[:200]!r}")


def invalid_requests() -> Iterator[tuple[str, bytes, int]]:
    """Invalid requests: path, body and the expected status."""
    infer = f"/v2/models/{quote(MODEL)}/infer"
    yield infer, b"", 400
    yield infer, b"not JSON", 400
    yield infer, b'{"inputs": [{"name": "x", "shape": [-1], "datatype": "FP32", "data": []}]}', 400
    yield infer, b"[" * 10_000, 400
    yield "/v2/models/nothing/infer", b"{}", 404
    yield f"/api/v1/models/{MODEL}/versions", b"no model", 422


async def soak(options: Options, report: Report) -> None:
    """Half an hour of traffic with uploads, rollbacks, disconnects and invalid requests: resource use stays flat."""
    seconds, rate = options.seconds or SECONDS, options.rate or RATE
    traffic = await Traffic.of(options, options.model)
    base = await asyncio.to_thread(Path(options.onnx).read_bytes)
    watch = Watch(traffic.admin.target)
    operations = BackgroundOperations(Admin.at(options.url, MODEL), base, report)
    loop = traffic.loop(arrivals.poisson(rate, seconds))
    running = asyncio.create_task(loop.run())
    background = [asyncio.create_task(watch.run()), asyncio.create_task(operations.run())]
    try:
        await asyncio.wait([running, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():
                task.result()  # raises the exception that ended it
        log = await running
    finally:
        loop.stop()
        for task in background:
            task.cancel()
        await asyncio.gather(running, *background, return_exceptions=True)
    report.phases.append(summarise(f"{rate:g}/s for {seconds:g} s", log, seconds, {}))
    report.promise_no_failures()
    check_gauges(watch, report)


def check_gauges(watch: Watch, report: Report) -> None:
    """Promise for each gauge that its slope (Theil-Sen) after the settling time is at most its limit."""
    first = int(len(watch.times) * SETTLING)
    hours = (np.array(watch.times[first:]) - watch.times[first]) / 3600
    for name, (what, scale, limit, unit) in GAUGES.items():
        values = np.array(watch.samples[name][first:]) * scale
        growth = slope(hours, values)
        measured = f"{growth:+.1f} {unit}/h over {60 * hours[-1]:.0f} min, at the end {values[-1]:,.0f} {unit}"
        report.promise(f"{what}: at most {limit:g} {unit}/h more", growth <= limit, measured)


def slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The Theil-Sen slope: the median over all pairs of points, which few outliers do not move; 0 without a pair."""
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] > x[first]
    slopes = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    return float(np.median(slopes)) if slopes.size else 0.0
