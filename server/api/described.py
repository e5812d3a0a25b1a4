"""The application: its routes are ready before the first request; ``/openapi.json`` is written on the first for it, and
``/docs`` shows it without anything from another server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from server.access.scopes import ROUTES
from server.api import protocol_schemas
from server.api.schemas import Failure
from server.repository import names

# What any request can meet, whatever it asks for: the head's faults, time and connections, and what nobody foresaw.
_OF_ALL = (400, 405, 408, 421, 431, 500, 501, 503, 505)
_OF_CALLERS = (401, 403)  # where a key may be needed
_KEY = "key"
_FORMS = {"model": names.MODEL.pattern, "version": f"{names.VERSION.pattern}|{names.ALIAS.pattern}"}  # in paths


class Application(FastAPI):
    """FastAPI's, but the description is made on another thread: it takes most of a second, in which requests wait."""

    def __init__(self, *, keyed: bool = False, **options: Any) -> None:
        """``keyed``: whether calls need a key."""
        self._keyed = keyed
        super().__init__(docs_url=None, redoc_url=None, **options)

    def setup(self) -> None:
        """Add the route before FastAPI adds its own, which would describe on the event loop."""
        self._describing = asyncio.Lock()
        self._description: bytes | None = None
        self._page = (files("server.api") / "docs.html").read_bytes()
        self._policy = _policy(self._page)
        self.add_route("/openapi.json", self._described, include_in_schema=False)
        self.add_route("/docs", self._shown, include_in_schema=False)
        super().setup()

    def ready_routes(self) -> None:
        """Have all included routes made now; call once the last one is there.

        FastAPI would make them when the first request looks for a route among them, which is a call that manages
        something: 22 ms of processor time on the event loop, in which nobody gets an answer.
        """
        nowhere: Scope = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []}
        for route in self.router.routes:
            route.matches(nowhere)

    def openapi(self) -> dict[str, Any]:
        """The description of the routes: of those that FastAPI knows the types of, and the protocol's."""
        described = super().openapi()
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
        schemas |= protocol_schemas.SCHEMAS
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        components["responses"] = {_name(status): _failure(status) for status in (*_OF_ALL, *_OF_CALLERS)}
        components["securitySchemes"] = {
            _KEY: {"type": "http", "scheme": "bearer", "description": "A key, or a token of the identity provider."}
        }
        return described

    def _complete(self, method: str, path: str, operation: dict[str, Any]) -> None:
        """Add to an operation what its route has in common with others."""
        responses = operation["responses"]
        if "HTTPValidationError" in str(responses.get("422")):
            del responses["422"]  # FastAPI's own; here it is 400
        need = ROUTES.get((method, path))
        for status in (*_OF_ALL, *(_OF_CALLERS if need else ())):
            responses.setdefault(str(status), {"$ref": f"#/components/responses/{_name(status)}"})
        if need and self._keyed:
            operation["security"] = [{_KEY: []}]
        if need:
            operation["description"] = f"{operation.get('description', '')}\n\nScope of the key: `{need}`.".strip()
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path" and (form := _FORMS.get(parameter["name"])):
                parameter["schema"] = {"pattern": f"^(?:{form})$", **parameter["schema"]}

    async def _described(self, request: Request) -> Response:
        async with self._describing:
            if self._description is None:
                self._description = await asyncio.to_thread(lambda: orjson.dumps(self.openapi()))
        return Response(self._description, media_type="application/json")

    async def _shown(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": self._policy})


def _name(status: int) -> str:
    return re.sub(r"\W", "", HTTPStatus(status).phrase)


def _failure(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ProtocolError"}
    return {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": schema}}}


def _policy(page: bytes) -> str:
    """Return a content security policy under which the page runs its own script and asks this server only."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
        for tag in ("script", "style")
        if (found := re.search(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL))
    }
    inline = "; ".join(f"{tag}-src 'sha256-{value}'" for tag, value in hashes.items())
    return f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; {inline}"
