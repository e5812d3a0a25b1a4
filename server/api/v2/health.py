"""The liveness and readiness routes."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from lathe.server.serving.dataplane import DataPlane

_LIVE, _READY = orjson.dumps({"live": True}), orjson.dumps({"ready": True})


class Live(BaseModel):
    """The process is alive."""

    live: bool


class Ready(BaseModel):
    """The server accepts requests."""

    ready: bool
    alarms: list[str] = Field(default=[], description="Problems that need attention; absent if there are none.")


class Awaited(BaseModel):
    """A live version that is not in memory."""

    name: str = Field(description="The model.")
    version: str
    state: str = Field(description="The version's state; the repository index has the reason.")


class NotReady(Ready):
    """The server should get no new requests."""

    reason: str
    waiting: list[Awaited] = Field(description="The live versions that are not in memory.")


def health_routes(plane: DataPlane) -> APIRouter:
    """The routes of liveness and readiness."""
    routes = APIRouter(tags=["health"])

    @routes.get("/v2/health/live", response_model=Live)
    async def live() -> Response:
        """Whether the process answers."""
        return Response(_LIVE, media_type="application/json")

    @routes.get("/v2/health/ready", response_model=Ready, responses={503: {"model": NotReady}})
    async def ready() -> Response:
        """Whether the server should get new requests: it has started, is not stopping, and misses no live version."""
        if plane.ready and (alarms := plane.alarms()):
            return Response(orjson.dumps({"ready": True, "alarms": alarms}), media_type="application/json")
        if plane.ready:
            return Response(_READY, media_type="application/json")
        return Response(_not_ready(plane), 503, media_type="application/json")

    return routes


def _not_ready(plane: DataPlane) -> bytes:
    waiting = [{"name": it.model, "version": str(it.version), "state": it.state} for it in plane.missing_versions()]
    return orjson.dumps({"ready": False, "reason": plane.not_ready_reason, "waiting": waiting})
