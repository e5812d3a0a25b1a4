"""The application and its description: ``/openapi.json``, written on the first request for it."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response


class Application(FastAPI):
    """FastAPI's, but the description is made on another thread: it takes most of a second, in which requests wait."""

    def setup(self) -> None:
        """Add the route before FastAPI adds its own, which would describe on the event loop."""
        self._describing = asyncio.Lock()
        self._description: bytes | None = None
        self.add_route("/openapi.json", self._described, include_in_schema=False)
        super().setup()

    async def _described(self, request: Request) -> Response:
        async with self._describing:
            if self._description is None:
                self._description = await asyncio.to_thread(lambda: orjson.dumps(self.openapi()))
        return Response(self._description, media_type="application/json")
