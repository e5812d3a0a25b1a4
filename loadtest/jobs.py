"""Scenario: a training job during normal traffic, and how much it slows inference down."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import orjson

from loadtest.admin import Admin, CallFailed
from loadtest.interference import measure_interference
from loadtest.scenario import Options, Report

DATASET, ROWS = "loadtest-images", 4096
RATIO = 1.5
PATIENCE = 120.0  # seconds for a job to begin or to end
RECIPE = {
    "epochs": 1_000_000,  # it trains until it is cancelled
    "batch": 64,
    "model": {"architecture": "lenet5", "channels": [32, 64]},
    "optimizer": {"kind": "adamw", "rate": 0.001},
    "augment": [{"kind": "affine", "degrees": 15.0}],
}


async def training(options: Options, report: Report) -> None:
    """A training job in the server's idle time: inference latency stays low and the job advances."""
    admin = Admin.at(options.url, options.model)
    await admin.call("POST", f"/api/v1/datasets/{DATASET}", images())
    steps: list[int] = []

    @asynccontextmanager
    async def job() -> AsyncIterator[None]:
        started = (await admin.call("POST", "/api/v1/jobs", submission())).result["id"]
        try:
            before = await _step(admin, started)
            yield
            steps.append(await _step(admin, started) - before)
        finally:
            await admin.call("POST", f"/api/v1/jobs/{started}/cancel")
            await _until_ended(admin, started)

    await measure_interference(options, report, "a training job", job, RATIO)
    report.promise("the job goes on meanwhile", min(steps) > 0, f"{min(steps)} to {max(steps)} steps per window")


def images() -> bytes:
    """Random images with random labels, as an .npz file."""
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    np.savez(file, image=rng.integers(0, 17, (ROWS, 8, 8)).astype(np.uint8), label=rng.integers(0, 10, ROWS))
    return file.getvalue()


def submission() -> bytes:
    return orjson.dumps({"kind": "train", "dataset": DATASET, "recipe": RECIPE})


async def _step(admin: Admin, job: str) -> int:
    """Wait until a job reports a step, and return the newest one.

    CallFailed if the job has ended, TimeoutError if it reports no step within PATIENCE.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            found = (await admin.call("GET", f"/api/v1/jobs/{job}")).result
            if found["finished"] is not None:
                raise CallFailed(f"the job ended: {found['state']} {found['error']}")
            if (found["progress"] or {}).get("kind") in {"step", "epoch"}:
                return int(found["progress"]["step"])
            await asyncio.sleep(0.1)


async def _until_ended(admin: Admin, job: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await admin.call("GET", f"/api/v1/jobs/{job}")).result["finished"] is None:
            await asyncio.sleep(0.1)
    await admin.call("DELETE", f"/api/v1/jobs/{job}")
