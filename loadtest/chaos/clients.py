"""Clients that change and query models at random, and record each operation with its outcome.

A change whose connection ends without a response is retried half of the time, with the same Idempotency-Key. Both calls
are then one operation, which lasts from the first call to the last response.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import orjson
from onnx import TensorProto, helper, numpy_helper

from loadtest.chaos.history import Operation
from loadtest.connection import Connection, Target
from loadtest.wire import Response, http_request, infer_body, infer_path, read_inferred

MODELS = ("left", "right")
ALIASES = ("live", "blue")
PROBE = "probe"  # the alias by which the audit brings versions into memory
WIDTH = 4
FIRST = 3  # versions of each model before the clients start
VERSIONS = 4  # clients delete only if a model has more versions
TIMEOUT = 90.0  # seconds to wait for a response
RETRY = 0.5  # probability that a change of unknown outcome is retried
AWAY = 0.05  # seconds between two attempts to connect


def model_file(factor: int) -> bytes:
    """The bytes of an ONNX model y = factor * x, for x float32[n, WIDTH]. Exact for whole numbers below 2^24."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in "xy")
    constant = numpy_helper.from_array(np.array(factor, np.float32), "factor")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "factor"], ["y"])], "times", [x], [y], [constant])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@dataclass
class SharedState:
    """State that all clients share."""

    target: Target
    random: random.Random
    history: list[Operation] = field(default_factory=list)
    digests: dict[str, int] = field(default_factory=dict)  # digest of an upload -> its factor
    versions: dict[str, set[int]] = field(default_factory=lambda: {model: set() for model in MODELS})
    factors: int = 0  # number of factors handed out
    keys: int = 0
    over: bool = False

    def next_factor(self) -> int:
        """A factor that no upload has had."""
        self.factors += 1
        return self.factors

    def next_key(self) -> str:
        """An Idempotency-Key that no call has had."""
        self.keys += 1
        return f"call-{self.keys}"


@dataclass
class Client:
    """A client that makes one call after the other, on one connection."""

    world: SharedState
    name: str
    model: str
    _connection: Connection | None = None

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[float, Response | None]:
        """Make a call. Returns its start time and its response; None if the connection or TIMEOUT ended first.

        Waits for a server that accepts connections.
        """
        connection = await self._connected()
        request = http_request(method, path, self.world.target.authority, body, headers)
        began = time.monotonic()
        try:
            return began, await asyncio.wait_for(connection.ask(request), TIMEOUT)
        except (ConnectionError, TimeoutError):
            self.leave()
            return began, None

    async def _connected(self) -> Connection:
        while self._connection is None or not self._connection.is_usable:
            try:
                self._connection = await self.world.target.connect()
            except OSError:
                await asyncio.sleep(AWAY)
        return self._connection

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def change(self, operation: Operation, method: str, path: str, body: bytes = b"") -> Operation:
        """Make a change, retry it at random if no response comes, and record it.

        After a retry a refusal is recorded as unknown, because the first call may have taken effect.
        """
        headers = {"Idempotency-Key": self.world.next_key()}
        if body[:1] == b"{":
            headers["Content-Type"] = "application/json"
        invoked, answer = await self.call(method, path, body, headers)
        tried = invoked
        while answer is None and self.world.random.random() < RETRY:
            tried, answer = await self.call(method, path, body, headers)
        operation = replace(operation, invoked=invoked, tried=tried)
        if answer is not None and answer.status < 300:
            made = answer.json()
            changed = made.get("changed", True)
            operation = replace(operation, version=made["version"], generation=made["generation"], changed=changed)
        elif tried > invoked and answer is not None:  # an earlier call may have taken effect
            answer = None
        return self.note(operation, answer)

    def note(self, operation: Operation, answer: Response | None) -> Operation:
        """Record the outcome of a call; it is unknown if `answer` is None or has status 500."""
        status, now = answer.status if answer else 0, time.monotonic()
        if answer is None:
            operation = replace(operation, outcome="unknown")
        elif status == 500:
            operation = replace(operation, outcome="unknown", status=status)
        else:
            operation = replace(operation, outcome="ok" if status < 300 else "failed", status=status, completed=now)
        self.world.history.append(operation)
        return operation

    def begin(self, kind: str, **facts: Any) -> Operation:
        """A new operation that starts now, with an unknown outcome."""
        return Operation(kind, self.name, time.monotonic(), None, "unknown", model=self.model, **facts)

    def some_version(self) -> int | None:
        """A random known version, the newest with a higher probability; None if none is known."""
        known = sorted(self.world.versions[self.model])
        if not known:
            return None
        return known[-1] if self.world.random.random() < 0.3 else self.world.random.choice(known)

    @property
    def path(self) -> str:
        return f"/api/v1/models/{self.model}"

    # changes

    async def upload(self, promoted: bool | None = None) -> None:
        """Upload a version with a distinct factor, with or without promotion."""
        factor, body = self._next_model()
        if promoted is None:
            promoted = self.world.random.random() < 0.5
        path = f"{self.path}/versions" + ("?promote=true" if promoted else "")
        operation = self.begin("upload", factor=factor, alias="live" if promoted else "")
        done = await self.change(operation, "POST", path, body)
        if done.outcome == "ok" and done.version is not None:
            self.world.versions[self.model].add(done.version)

    async def cut_off(self) -> None:
        """Start an upload and disconnect in the middle of its body: it must never become a version."""
        factor, body = self._next_model()
        connection = await self._connected()
        operation = self.begin("upload", factor=factor, alias="live")
        request = http_request("POST", f"{self.path}/versions?promote=true", self.world.target.authority, body)
        connection.send(request[: len(request) - self.world.random.randint(1, len(body))], lambda *_: None)
        await asyncio.sleep(self.world.random.random() * AWAY)
        self.leave()
        self.world.history.append(replace(operation, outcome="failed", completed=time.monotonic()))

    def _next_model(self) -> tuple[int, bytes]:
        factor = self.world.next_factor()
        body = model_file(factor)
        self.world.digests[hashlib.sha256(body).hexdigest()] = factor
        return factor, body

    async def move(self) -> None:
        """Move a random alias to another version, or roll it back."""
        alias, version = self.world.random.choice(ALIASES), self.some_version()
        if self.world.random.random() < 0.4:
            body = orjson.dumps({"alias": alias})
            await self.change(self.begin("rollback", alias=alias), "POST", f"{self.path}/rollback", body)
        elif version is not None:
            await self.move_to(alias, version)

    async def move_to(self, alias: str, version: int) -> Operation:
        """Move an alias to a version."""
        operation = self.begin("move", alias=alias, version=version)
        return await self.change(operation, "PUT", f"{self.path}/aliases/{alias}", orjson.dumps({"version": version}))

    async def delete(self) -> None:
        """Delete a version if there are more than VERSIONS. The server refuses it if an alias names the version."""
        versions, version = self.world.versions[self.model], self.some_version()
        if len(versions) <= VERSIONS or version is None:
            return
        versions.discard(version)
        done = await self.change(self.begin("delete", version=version), "DELETE", f"{self.path}/versions/{version}")
        if done.outcome == "failed" and done.status != 404:
            versions.add(version)

    # queries

    async def ask(self) -> None:
        """An inference by the live version, by an alias or by a version."""
        chosen, version = self.world.random.random(), self.some_version()
        await self.infer("" if chosen < 0.5 or version is None else "blue" if chosen < 0.75 else str(version))

    async def infer(self, asked: str) -> Operation:
        """Infer on random numbers, and record the version and the factor of the answer."""
        x = np.array([self.world.random.choices(range(1, 100), k=WIDTH)], np.float32)
        body, size = infer_body({"x": x})
        headers = {"Inference-Header-Content-Length": str(size)}
        operation = self.begin("infer", asked=asked)
        invoked, answer = await self.call("POST", infer_path(self.model, asked), body, headers)
        operation = replace(operation, invoked=invoked)
        if answer is not None and answer.status == 200:
            inferred = read_inferred(answer)
            operation = replace(operation, version=int(inferred.version), factor=_factor(x, inferred.outputs["y"]))
        return self.note(operation, answer)

    async def look(self) -> None:
        """Read the aliases or list the versions, at random."""
        if self.world.random.random() < 0.8:
            await self.aliases()
        else:
            await self.list_versions()

    async def aliases(self) -> None:
        """Read which versions the aliases name."""
        operation = self.begin("aliases")
        invoked, answer = await self.call("GET", self.path)
        found = answer.json()["aliases"] if answer is not None and answer.status == 200 else {}
        self.note(replace(operation, invoked=invoked, found=found), answer)

    async def list_versions(self) -> dict[str, int]:
        """The factors by version: that of the upload with the same digest, 0 without one. Empty if the call fails."""
        operation = self.begin("versions")
        invoked, answer = await self.call("GET", f"{self.path}/versions")
        listed = answer.json() if answer is not None and answer.status == 200 else []
        found = {str(entry["version"]): self.world.digests.get(entry["digest"] or "", 0) for entry in listed}
        self.note(replace(operation, invoked=invoked, found=found), answer)
        return found

    async def audit(self) -> None:
        """Move the alias PROBE to every listed version, one by one, and infer with it.

        Versions that only the server knew become known to the clients.
        """
        operation = self.begin("audit")
        listed, found = await self.list_versions(), dict[str, int]()
        for version in listed:
            await self.move_to(PROBE, int(version))
            done = await self.infer(version)
            if done.outcome == "ok" and done.factor is not None:
                found[version] = done.factor
        self.world.versions[self.model] |= {int(version) for version in found}
        self.world.history.append(replace(operation, outcome="ok", completed=time.monotonic(), found=found))


def _factor(x: Any, y: Any) -> int:
    """The whole number `y / x`; 0 if `y` is no such multiple of `x`."""
    factor = round(float(y.flat[0] / x.flat[0]))
    return factor if y.shape == x.shape and np.array_equal(y, x * np.float32(factor)) else 0


Act = Callable[[Client], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Habit:
    """An action, the number of clients per model that repeat it, and the mean pause between two actions."""

    act: Act
    clients: int
    pause: float  # seconds on average


# Few calls per second, because uploads are compiled at idle priority.
HABITS = {
    "uploader": Habit(Client.upload, 2, 0.3),
    "cutter": Habit(Client.cut_off, 1, 3.0),
    "mover": Habit(Client.move, 3, 0.4),
    "deleter": Habit(Client.delete, 1, 0.3),
    "asker": Habit(Client.ask, 2, 0.15),
    "looker": Habit(Client.look, 1, 0.3),
}


async def repeat_until_over(client: Client, habit: Habit) -> None:
    """Repeat an action with random pauses until the run is over."""
    try:
        while not client.world.over:
            await asyncio.sleep(client.world.random.expovariate(1 / habit.pause))
            await habit.act(client)
    finally:
        client.leave()
