"""The service `grpc.health.v1.Health`: readiness, as one answer or as a stream of changes.

Readiness is a single flag here, so this is shorter than wiring up the package `grpcio-health-checking`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from lathe.server.access.addresses import client_of_peer
from lathe.server.api.grpc.messages import HEALTH, Message, message_class
from lathe.server.errors import NotFound, Overloaded
from lathe.server.serving.dataplane import DataPlane

TICK = 0.25  # seconds between two checks for changes
WATCHERS = 64  # the most watching calls of all callers together
SERVICES = frozenset({"", "inference.GRPCInferenceService"})
_RESPONSE = HEALTH.message_types_by_name["HealthCheckResponse"]
_STATUS: dict[str, int] = {value.name: value.number for value in _RESPONSE.enum_types_by_name["ServingStatus"].values}
HealthCheckResponse = message_class(_RESPONSE)


class HealthService:
    """Answers for the whole server and for the inference service, which have the same status."""

    def __init__(self, plane: DataPlane, stopping: asyncio.Event, watchers: int = WATCHERS) -> None:
        """`watchers`: the most watching calls; at most half of them from one address."""
        self._plane = plane
        self._stopping = stopping
        self._watchers = watchers
        self._watching: Counter[str] = Counter()  # by address
        self._news = asyncio.Event()  # set at the next change
        self._notifier: asyncio.Task[None] | None = None  # runs while there are watchers

    async def Check(self, request: Message, context: Any) -> Message:
        """Answer with the current status; NotFound for an unknown service."""
        if request.service not in SERVICES:
            raise NotFound(f"service {request.service[:80]!r}: expected one of {sorted(SERVICES)}")
        return HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Message, context: Any) -> AsyncIterator[Message]:
        """Answer now and at every change, until the caller leaves or the server stops.

        An unknown service has the status SERVICE_UNKNOWN. Overloaded if there are too many watchers: they need no key,
        and each counts towards the server's call limit.
        """
        address = client_of_peer(context.peer())
        self._check_room(address)
        self._watching[address] += 1
        if self._notifier is None:
            self._notifier = asyncio.create_task(self._notify())
        try:
            async for status in self._changes(request.service):
                yield HealthCheckResponse(status=status)
        finally:
            self._watching[address] -= 1
            if not self._watching[address]:
                del self._watching[address]

    def _check_room(self, address: str) -> None:
        most = max(1, self._watchers // 2)
        if self._watching[address] >= most:
            raise Overloaded(f"health: expected at most {most} watching calls of one address", retry_after=1)
        if self._watching.total() >= self._watchers:
            raise Overloaded(f"health: expected at most {self._watchers} watching calls", retry_after=1)

    async def _changes(self, service: str) -> AsyncIterator[int]:
        last = None
        while True:
            stopping, news = self._stopping.is_set(), self._news
            status = self._status(service)
            if status != last:
                yield status
                last = status
            if stopping:
                return
            await news.wait()

    async def _notify(self) -> None:
        """Check every `TICK` seconds whether readiness has changed or the server stops, and wake all watchers then.

        Ends when there are no watchers.
        """
        last: tuple[bool, bool] | None = None
        while self._watching:
            now = self._plane.ready, self._stopping.is_set()
            if now != last:
                news, self._news, last = self._news, asyncio.Event(), now
                news.set()
            await asyncio.sleep(TICK)
        self._notifier = None

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return _STATUS["SERVICE_UNKNOWN"]
        return _STATUS["SERVING" if self._plane.ready else "NOT_SERVING"]
