"""Whether the process lives, and whether it wants work."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from server.dataplane import DataPlane

_LIVE, _READY = orjson.dumps({"live": True}), orjson.dumps({"ready": True})


class Live(BaseModel):
    """The process answers."""

    live: bool


class Ready(BaseModel):
    """New callers should come here."""

    ready: bool
    alarms: list[str] = Field(default=[], description="What needs attention while requests are answered; else absent.")


class Awaited(BaseModel):
    """A version that should answer and is not in memory."""

    name: str = Field(description="The model.")
    version: str
    state: str = Field(description="How far the version has come; the repository's index says why it came no further.")


class NotReady(Ready):
    """New callers should not come here."""

    reason: str
    waiting: list[Awaited] = Field(description="The live versions that are not in memory.")


def health_routes(plane: DataPlane) -> APIRouter:
    """Return the liveness and readiness routes."""
    routes = APIRouter(tags=["health"])

    @routes.get("/v2/health/live", response_model=Live)
    async def live() -> Response:
        """Whether the process answers."""
        return Response(_LIVE, media_type="application/json")

    @routes.get("/v2/health/ready", response_model=Ready, responses={503: {"model": NotReady}})
    async def ready() -> Response:
        """Whether every live version is in memory, and the server is not stopping."""
        if plane.ready and (alarms := plane.alarms()):
            return Response(orjson.dumps({"ready": True, "alarms": alarms}), media_type="application/json")
        if plane.ready:
            return Response(_READY, media_type="application/json")
        return Response(_not_ready(plane), 503, media_type="application/json")

    return routes


def _not_ready(plane: DataPlane) -> bytes:
    waiting = [{"name": it.model, "version": str(it.version), "state": it.state} for it in plane.awaited()]
    return orjson.dumps({"ready": False, "reason": plane.unready, "waiting": waiting})
