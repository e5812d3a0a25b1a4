"""Whether the process lives, and whether it wants work."""

from __future__ import annotations

from fastapi import APIRouter, Response

from server.dataplane import DataPlane


def health_routes(plane: DataPlane) -> APIRouter:
    """Return the liveness and readiness routes."""
    routes = APIRouter(tags=["health"])

    @routes.get("/v2/health/live")
    async def live() -> Response:
        return Response()

    @routes.get("/v2/health/ready")
    async def ready() -> Response:
        return Response(status_code=200 if plane.ready else 503)

    return routes
