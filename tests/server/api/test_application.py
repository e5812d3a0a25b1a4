"""Nobody waits for the description of the API but those who ask for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx

from server.api.described import Application


class Watched(Application):
    def openapi(self) -> dict[str, Any]:
        self.made_on.append(threading.get_ident())
        return super().openapi()

    def __init__(self) -> None:
        self.made_on: list[int] = []
        super().__init__()


def test_the_description_is_made_once_and_off_the_event_loop() -> None:
    app = Watched()
    app.get("/thing")(lambda: 1)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))

    answers = asyncio.run(ask())
    assert all("/thing" in answer.json()["paths"] for answer in answers)
    assert len(app.made_on) == 1
    assert app.made_on[0] != threading.get_ident()
