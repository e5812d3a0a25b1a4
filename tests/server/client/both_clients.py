"""The blocking and the asyncio client behind one blocking interface, so that each test runs with both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lathe.server.client import AsyncClient, Client


class Awaited:
    """An `AsyncClient` in an event loop of its own; its operations block."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._client = AsyncClient(*args, **options)
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            return self._loop.run_until_complete(found(*args, **options))

        return call

    def job_events(self, *args: Any, **options: Any) -> list[Any]:
        async def events() -> list[Any]:
            return [event async for event in self._client.job_events(*args, **options)]

        return self._loop.run_until_complete(events())

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


BOTH = {"blocking": Client, "asyncio": Awaited}
