"""Control-plane calls of a scenario, made while traffic runs: metadata, statistics, uploads, aliases.

They run on the traffic's event loop, so the order of acknowledgements and requests is exact.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from numpy.typing import NDArray

from loadtest.connection import Target
from loadtest.wire import DTYPES, Response


class CallFailed(RuntimeError):
    """The server refused a call of the control plane, or a job of the scenario ended too early."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An acknowledged call. `started` and `ended` are seconds of the monotonic clock."""

    started: float
    ended: float
    result: Any

    @property
    def ms(self) -> float:
        return (self.ended - self.started) * 1e3


class Admin:
    """Calls the control plane of one server for one model."""

    def __init__(self, target: Target, model: str) -> None:
        self.target, self.model = target, model

    @staticmethod
    def at(url: str, model: str) -> Admin:
        return Admin(Target(url), model)

    async def metadata(self) -> dict[str, Any]:
        answer = await self.call("GET", f"/v2/models/{quote(self.model, safe='')}")
        return dict(answer.result)

    async def batches(self) -> dict[int, int]:
        """Executions by batch size so far, over all versions."""
        return await self._by_size("count")

    async def batch_ns(self) -> dict[int, int]:
        """Execution time in nanoseconds by batch size so far, over all versions."""
        return await self._by_size("ns")

    async def _by_size(self, figure: str) -> dict[int, int]:
        answer = await self.call("GET", f"/v2/models/{quote(self.model, safe='')}/stats")
        sums: dict[int, int] = {}
        for version in answer.result["model_stats"]:
            for entry in version["batch_stats"]:
                size = int(entry["batch_size"])
                sums[size] = sums.get(size, 0) + int(entry["compute_infer"][figure])
        return sums

    async def upload(self, model: bytes) -> Timed:
        """Upload and promote a version; `result["version"]` is its number."""
        return await self.call("POST", f"{self._path}/versions?promote=true&allow_signature_change=true", model)

    async def set_alias(self, version: int) -> Timed:
        return await self.call("PUT", f"{self._path}/aliases/live", orjson.dumps({"version": version}))

    async def rollback(self) -> Timed:
        return await self.call("POST", f"{self._path}/rollback", b"{}")

    @property
    def _path(self) -> str:
        return f"/api/v1/models/{quote(self.model, safe='')}"

    async def call(self, method: str, path: str, body: bytes = b"") -> Timed:
        """Make one call. CallFailed if the status is not 2xx, ConnectionError if no response comes."""
        headers = {"Content-Type": "application/json"} if body[:1] == b"{" else {}
        started = time.monotonic()
        response = await self.target.ask(method, path, body, headers)
        ended = time.monotonic()
        return Timed(started, ended, _expect_success(response, f"{method} {path}"))


def _expect_success(response: Response, call: str) -> Any:
    if not 200 <= response.status < 300:
        raise CallFailed(f"{call}: HTTP {response.status}: {response.body[:500].decode(errors='replace')}")
    return response.json()


def difference(after: dict[int, int], before: dict[int, int]) -> dict[int, int]:
    """By how much each counter (batch size -> count) grew; sizes without growth are left out."""
    gained = {size: count - before.get(size, 0) for size, count in sorted(after.items())}
    return {size: count for size, count in gained.items() if count}


def random_inputs(metadata: dict[str, Any], rows: int, seed: int) -> dict[str, NDArray[Any]]:
    """Random inputs that fit a model's metadata.

    Dynamic dimensions become `rows` (axis 0) or 1. Values are whole numbers from 0 to 15.
    """
    rng = np.random.default_rng(seed)
    inputs = {}
    for tensor in metadata["inputs"]:
        shape = [d if d >= 0 else (rows if axis == 0 else 1) for axis, d in enumerate(tensor["shape"])]
        inputs[tensor["name"]] = rng.integers(0, 16, shape).astype(DTYPES[tensor["datatype"]])
    return inputs
