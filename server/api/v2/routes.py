"""The routes of the Open Inference Protocol with NVIDIA's extensions. Inference here is the ASGI endpoint."""

from __future__ import annotations

from typing import Any, Protocol

import orjson
from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from lathe.server.api.codec import json_tensors
from lathe.server.api.inference.asgi import InferEndpoint
from lathe.server.api.inference.infer import InferService
from lathe.server.api.v2 import model_info
from lathe.server.api.v2.protocol_settings import TRACE_SETTINGS, LogSettings, update_trace
from lathe.server.errors import BadRequest
from lathe.server.serving.dataplane import DataPlane
from lathe.server.telemetry.statistics import StatsBook


class RepositoryControl(Protocol):
    """The repository extension's operations."""

    async def index(self, ready: bool = False) -> list[dict[str, Any]]:
        """Name, version, state and, if there is one, the reason of every version, or only of the ready ones."""
        ...

    async def load(self, model: str, parameters: dict[str, Any] | None = None) -> None:
        """Load or reload a model; NotFound if it is unknown.

        If no version answers as `live` afterwards, raises the error that prevents it.
        """
        ...

    async def unload(self, model: str, unload_dependents: bool = False) -> None:
        """Unload a model; NotFound if it is unknown, Conflict if a loaded pipeline names a version of it by number."""
        ...


def v2_routes(
    plane: DataPlane,
    infer: InferService,
    book: StatsBook,
    control: RepositoryControl,
    logs: LogSettings,
) -> APIRouter:
    """All routes below /v2 except health and shared memory."""
    routes = APIRouter(tags=["v2"])
    _server_routes(routes, plane, logs)
    _trace_routes(routes, plane)
    _repository_routes(routes, control)
    _statistics_routes(routes, plane, book)
    _model_routes(routes, plane)
    for path in ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        routes.routes.append(Route(path, InferEndpoint(infer), methods=["POST"], include_in_schema=False))
    return routes


def json_response(value: object) -> Response:
    """A JSON response, never compressed."""
    return Response(orjson.dumps(value), media_type="application/json")


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object of the body; {} for an empty body, BadRequest if the body is no JSON object.

    TooLarge as `json_tensors.parse`. The content type is ignored: clients do not send it.
    """
    body = await request.body()
    value = json_tensors.parse(body, "body").document if body else {}
    if not isinstance(value, dict):
        raise BadRequest(f"body: expected an object, got {type(value).__name__}")
    return value


def _server_routes(routes: APIRouter, plane: DataPlane, logs: LogSettings) -> None:
    @routes.get("/v2")
    async def server_metadata() -> Response:
        return json_response(model_info.server_metadata(plane))

    @routes.get("/v2/logging")
    async def get_logging() -> Response:
        return json_response(logs.values)

    @routes.post("/v2/logging")
    async def set_logging(request: Request) -> Response:
        return json_response(logs.update(await read_json(request)))


def _trace_routes(routes: APIRouter, plane: DataPlane) -> None:
    """Add the routes of trace settings. Models have no settings of their own; an unknown model gives NotFound."""

    @routes.get("/v2/trace/setting")
    async def get_trace() -> Response:
        return json_response(TRACE_SETTINGS)

    @routes.post("/v2/trace/setting")
    async def set_trace(request: Request) -> Response:
        return json_response(update_trace(await read_json(request)))

    @routes.get("/v2/models/{model}/trace/setting")
    async def get_trace_of_model(model: str) -> Response:
        plane.is_ready(model)
        return json_response(TRACE_SETTINGS)

    @routes.post("/v2/models/{model}/trace/setting")
    async def set_trace_of_model(model: str, request: Request) -> Response:
        plane.is_ready(model)
        return json_response(update_trace(await read_json(request)))


def _repository_routes(routes: APIRouter, control: RepositoryControl) -> None:
    @routes.post("/v2/repository/index")
    async def index(request: Request) -> Response:
        body = await read_json(request)
        return json_response(await control.index(_flag(body, "ready")))

    @routes.post("/v2/repository/models/{model}/load")
    async def load(model: str, request: Request) -> Response:
        body = await read_json(request)
        await control.load(model, _object(body, "parameters"))
        return Response()

    @routes.post("/v2/repository/models/{model}/unload")
    async def unload(model: str, request: Request) -> Response:
        body = await read_json(request)
        await control.unload(model, _flag(_object(body, "parameters"), "unload_dependents"))
        return Response()


def _statistics_routes(routes: APIRouter, plane: DataPlane, book: StatsBook) -> None:
    @routes.get("/v2/models/stats")
    @routes.get("/v2/models/{model}/stats")
    @routes.get("/v2/models/{model}/versions/{version}/stats")
    async def statistics(model: str = "", version: str = "") -> Response:
        return json_response(model_info.statistics(plane, book, model, version))


def _model_routes(routes: APIRouter, plane: DataPlane) -> None:
    @routes.get("/v2/models/{model}")
    @routes.get("/v2/models/{model}/versions/{version}")
    async def model_metadata(model: str, version: str = "") -> Response:
        return json_response(model_info.metadata(plane.resolve(model, version), plane.registry.servables()))

    @routes.get("/v2/models/{model}/config")
    @routes.get("/v2/models/{model}/versions/{version}/config")
    async def model_config(model: str, version: str = "") -> Response:
        return json_response(model_info.configuration(plane.resolve(model, version)))

    @routes.get("/v2/models/{model}/ready")
    @routes.get("/v2/models/{model}/versions/{version}/ready")
    async def model_ready(model: str, version: str = "") -> Response:
        if not plane.is_ready(model, version):
            raise BadRequest(f"model {model!r} is not ready")
        return Response()


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{name}: expected a boolean, got {type(value).__name__}")
    return value


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{name}: expected an object, got {type(value).__name__}")
    return value
