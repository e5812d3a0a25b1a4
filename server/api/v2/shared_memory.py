"""The shared memory extensions of the protocol: system shared memory is supported, CUDA shared memory is not."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from lathe.server.api.management.schemas import integral
from lathe.server.api.v2.routes import json_response, read_json
from lathe.server.errors import BadRequest, NotFound, Unsupported
from lathe.server.shared_memory import Regions

_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
NO_CUDA = "CUDA shared memory is not supported; use system shared memory, or send tensors in the message"


def shared_memory_routes(regions: Regions) -> APIRouter:
    """The routes that register, list and unregister regions."""
    routes = APIRouter(tags=["v2"])

    @routes.get(f"{_SYSTEM}/status")
    async def status() -> Response:
        return json_response(regions.status())

    @routes.get(f"{_SYSTEM}/region/{{region}}/status")
    async def status_of_region(region: str) -> Response:
        return json_response(regions.status(region))

    @routes.post(f"{_SYSTEM}/region/{{region}}/register")
    async def register(region: str, request: Request) -> Response:
        body = await read_json(request)
        key = body.get("key")
        if not isinstance(key, str):
            raise BadRequest(f"key: expected a string, got {type(key).__name__}")
        regions.register(region, key, _bytes(body, "offset", 0), _bytes(body, "byte_size", None))
        return Response()

    @routes.post(f"{_SYSTEM}/unregister")
    async def unregister() -> Response:
        regions.unregister()
        return Response()

    @routes.post(f"{_SYSTEM}/region/{{region}}/unregister")
    async def unregister_region(region: str) -> Response:
        regions.unregister(region)
        return Response()

    _cuda_routes(routes)
    return routes


def _cuda_routes(routes: APIRouter) -> None:
    @routes.get(f"{_CUDA}/status")
    async def cuda_status() -> Response:
        return json_response([])

    @routes.get(f"{_CUDA}/region/{{region}}/status")
    async def cuda_status_of_region(region: str) -> Response:
        raise NotFound(f"unknown region of CUDA shared memory {region[:80]!r}")

    @routes.post(f"{_CUDA}/region/{{region}}/register")
    async def cuda_register(region: str) -> Response:
        raise Unsupported(NO_CUDA)

    @routes.post(f"{_CUDA}/unregister")
    @routes.post(f"{_CUDA}/region/{{region}}/unregister")
    async def cuda_unregister(region: str = "") -> Response:
        return Response()


def _bytes(body: dict[str, object], name: str, default: int | None) -> int:
    value = integral(body.get(name, default))
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{name}: expected a number of bytes, got {type(value).__name__}")
    return value
