"""The FastAPI application: creates its routes once, `/openapi.json` on first use, and serves `/docs` without a CDN."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from lathe.server.access.scopes import ROUTES, alternatives
from lathe.server.api.management.schemas import Failure
from lathe.server.api.v2 import protocol_schemas
from lathe.server.repository import names

# Statuses that any route may answer with: errors in the head, timeouts, connection limits and unexpected errors.
_COMMON_STATUSES = (400, 405, 408, 421, 431, 500, 501, 503, 505)
_KEY_STATUSES = (401, 403)  # statuses of routes that may need a key
# Further statuses of routes for texts: unknown models, bodies, what the model cannot do, and quotas.
_TEXT_STATUSES = (404, 413, 415, 422, 429)
_TEXT_PATH = re.compile(r"/v1/|/v2/models/.*/generate(_stream)?$")
# An error below /v1. Those of a damaged head are sent before the path is known, and have the form of the protocol.
_OPENAI_ERROR = "OpenAIError"
_OPENAI_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                }
            },
        },
        {"$ref": "#/components/schemas/ProtocolError"},
    ]
}
_KEY = "key"  # the name of the security scheme
_PATTERNS = {
    "model": names.MODEL_PATTERN.pattern,
    "version": f"{names.VERSION_PATTERN.pattern}|{names.ALIAS_PATTERN.pattern}",
}  # path parameters


class Application(FastAPI):
    """FastAPI, with the OpenAPI description made on a thread: it takes most of a second, which would block requests."""

    def __init__(self, *, keyed: bool = False, **options: Any) -> None:
        """`keyed`: whether calls need a key. `options` are those of FastAPI."""
        self._keyed = keyed
        super().__init__(docs_url=None, redoc_url=None, **options)

    def setup(self) -> None:
        """Add /openapi.json and /docs before FastAPI's own routes, which would make the document on the event loop."""
        self._lock = asyncio.Lock()
        self._description: bytes | None = None
        self._page = (files("lathe.server.api") / "docs.html").read_bytes()
        self._policy = _policy(self._page)
        self.add_route("/openapi.json", self._serve_description, include_in_schema=False)
        self.add_route("/docs", self._serve_page, include_in_schema=False)
        super().setup()

    def add_routes(self, router: APIRouter) -> None:
        """Add the routes of a router.

        FastAPI's `include_router` creates each a second time, at the first request that looks for a route, a management
        call: that blocks the event loop for 22 ms of CPU time.
        """
        self.router.routes.extend(router.routes)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI description of the management routes, by FastAPI, and of the protocol's routes.

        Made at the first call; later calls return the same document.
        """
        if self.openapi_schema is None:
            described = super().openapi()
            self.openapi_schema = None  # FastAPI has cached its part; a failure must not leave a part extended
            self.openapi_schema = self._extended(described)
        return self.openapi_schema

    def _extended(self, described: dict[str, Any]) -> dict[str, Any]:
        """Add the protocol's routes, common errors and the security scheme to FastAPI's document, and return it."""
        paths = described["paths"]
        for (method, path), route in protocol_schemas.ROUTES.items():
            made = protocol_schemas.operation(method, path, route)
            made["responses"] |= {str(status): _failure(status) for status in route.statuses}
            paths.setdefault(path, {})[method.lower()] = made
        for path, operations in paths.items():
            for method, operation in operations.items():
                self._complete(method.upper(), path, operation)
        components = described.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas.setdefault(Failure.__name__, Failure.model_json_schema())
        schemas |= protocol_schemas.SCHEMAS | {_OPENAI_ERROR: _OPENAI_SCHEMA}
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        statuses = (*_COMMON_STATUSES, *_KEY_STATUSES, *_TEXT_STATUSES)
        components["responses"] = {_name(status): _failure(status) for status in statuses}
        components["securitySchemes"] = {
            _KEY: {"type": "http", "scheme": "bearer", "description": "A key, or a token of the identity provider."}
        }
        return described

    def _complete(self, method: str, path: str, operation: dict[str, Any]) -> None:
        """Add common errors, security, the required scope and the patterns of path parameters to an operation."""
        responses = operation["responses"]
        if "HTTPValidationError" in str(responses.get("422")):
            del responses["422"]  # FastAPI's default for invalid requests; this server answers 400
        need = ROUTES.get((method, path))
        more = _TEXT_STATUSES if _TEXT_PATH.match(path) else ()
        for status in (*_COMMON_STATUSES, *(_KEY_STATUSES if need else ()), *more):
            responses.setdefault(str(status), _described(status, path))
        if need and self._keyed:
            operation["security"] = [{_KEY: []}]
        if need:
            scopes = " or ".join(f"`{scope}`" for scope in alternatives(need))
            operation["description"] = f"{operation.get('description', '')}\n\nScope of the key: {scopes}.".strip()
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path" and (form := _PATTERNS.get(parameter["name"])):
                parameter["schema"] = {"pattern": f"^(?:{form})$", **parameter["schema"]}

    async def _serve_description(self, request: Request) -> Response:
        async with self._lock:
            if self._description is None:
                self._description = await asyncio.to_thread(lambda: orjson.dumps(self.openapi()))
        return Response(self._description, media_type="application/json")

    async def _serve_page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": self._policy})


def _name(status: int) -> str:
    return re.sub(r"\W", "", HTTPStatus(status).phrase)


def _described(status: int, path: str) -> dict[str, Any]:
    """The response of an error: below /v1 in the form of OpenAI's API."""
    if path.startswith("/v1/"):
        return _failure(status, _OPENAI_ERROR)
    return {"$ref": f"#/components/responses/{_name(status)}"}


def _failure(status: int, kind: str = "ProtocolError") -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind}"}
    return {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": schema}}}


def _policy(page: bytes) -> str:
    """The Content-Security-Policy for the HTML in `page`: only its own script and style, and calls to this server."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
        for tag in ("script", "style")
        if (found := re.search(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL))
    }
    inline = "; ".join(f"{tag}-src 'sha256-{value}'" for tag, value in hashes.items())
    return f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; {inline}"
