"""The application: its routes are ready before the first request; ``/openapi.json`` is written on the first for it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from server.api.schemas import Failure


class Application(FastAPI):
    """FastAPI's, but the description is made on another thread: it takes most of a second, in which requests wait."""

    def setup(self) -> None:
        """Add the route before FastAPI adds its own, which would describe on the event loop."""
        self._describing = asyncio.Lock()
        self._description: bytes | None = None
        self.add_route("/openapi.json", self._described, include_in_schema=False)
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
        """The description of the routes, with the schema of errors to which they refer."""
        described = super().openapi()
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        schemas.setdefault(Failure.__name__, Failure.model_json_schema())
        return described

    async def _described(self, request: Request) -> Response:
        async with self._describing:
            if self._description is None:
                self._description = await asyncio.to_thread(lambda: orjson.dumps(self.openapi()))
        return Response(self._description, media_type="application/json")
