"""``grpc.health.v1.Health``: ready or not, once or as a stream of changes.

Readiness is one flag here, so this is shorter than a package that keeps a table of services would be to wire up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from server.api.grpc.messages import HEALTH, Message, message_class
from server.dataplane import DataPlane
from server.errors import NotFound

TICK = 0.25  # seconds within which a watcher hears of a change
SERVICES = frozenset({"", "inference.GRPCInferenceService"})
_RESPONSE = HEALTH.message_types_by_name["HealthCheckResponse"]
_STATUS: dict[str, int] = {value.name: value.number for value in _RESPONSE.enum_types_by_name["ServingStatus"].values}
HealthCheckResponse = message_class(_RESPONSE)


class HealthService:
    """Answers for the whole server and for the inference service, which are one."""

    def __init__(self, plane: DataPlane, stopping: asyncio.Event) -> None:
        self._plane = plane
        self._stopping = stopping

    async def Check(self, request: Message, context: Any) -> Message:
        """Answer once; raises NotFound for a service that is not here."""
        if request.service not in SERVICES:
            raise NotFound(f"service {request.service[:80]!r}: expected one of {sorted(SERVICES)}")
        return HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Message, context: Any) -> AsyncIterator[Message]:
        """Answer now and at every change, until the caller leaves or the server stops."""
        last = None
        while True:
            stopping = self._stopping.is_set()
            status = self._status(request.service)
            if status != last:
                yield HealthCheckResponse(status=status)
                last = status
            if stopping:
                return
            await asyncio.sleep(TICK)

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return _STATUS["SERVICE_UNKNOWN"]
        return _STATUS["SERVING" if self._plane.ready else "NOT_SERVING"]
