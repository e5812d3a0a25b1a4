"""The client for asyncio."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from server.client.call import AsyncSender, Call, Outgoing
from server.client.connection import Connection
from server.client.following import PAUSE, Following
from server.client.inference import InferenceOperations
from server.client.models import ModelOperations
from server.client.training import TrainingOperations
from server.sse import JobEvent

T = TypeVar("T")


class AsyncClient(ModelOperations, InferenceOperations, TrainingOperations, AsyncSender):
    """One server, for one event loop. The arguments and operations are those of `Client`; operations are awaited.

    Files are read in threads, so that the loop goes on.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float = 30.0,
        upload_timeout: float = 1800.0,
        patience: float = 10.0,
        api_key: str | None = None,
        ca: Path | str | None = None,
        cert: Path | str | None = None,
        cert_key: Path | str | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        given = Connection.of(url, timeout, upload_timeout, patience, api_key, ca, cert, cert_key, verify)
        self._connection = given
        self._http = httpx.AsyncClient(**given.arguments, transport=transport)
        self._has_answered = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.url!r})"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def job_events(self, job: str, *, after: str = "") -> AsyncIterator[JobEvent]:
        """Follow a job until it has ended, from its start or after the event of that id; survives lost connections."""
        following = Following(job, after)
        while True:
            try:
                async for event in self._events(following):
                    yield event
            except httpx.HTTPError as error:
                following.lost(error)
            else:
                if (await self.job(job)).state.is_final:  # else the server is about to stop
                    return
            await asyncio.sleep(PAUSE)

    async def _events(self, following: Following) -> AsyncIterator[JobEvent]:
        async with self._http.stream("GET", following.path, headers=following.headers) as response:
            if not response.is_success:
                await response.aread()
                raise following.refused(response)
            async for line in response.aiter_lines():
                if event := following.take(line):
                    yield event

    async def run(self, call: Call[T]) -> T:
        patience = self._connection.patient(call, self._has_answered)
        async with _in_threads(call.opened()) as outgoing:
            while True:
                outcome = await self._once(call, outgoing)
                pause = patience.before_next(outcome)
                if pause is None:
                    break
                await asyncio.sleep(pause)
        if isinstance(outcome, httpx.HTTPError):
            raise self._connection.failure(call, outcome) from outcome
        return call.result(outcome)

    async def _once(self, call: Call[Any], outgoing: Outgoing) -> httpx.Response | httpx.HTTPError:
        content = call.content if outgoing.body is None else _pieces(outgoing.pieces(outgoing.body))
        options = self._connection.options(call, outgoing, content)
        try:
            response = await self._http.request(call.method, call.path, **options)
        except httpx.HTTPError as error:
            return error
        self._has_answered = True
        return response


@asynccontextmanager
async def _in_threads(opened: AbstractContextManager[Outgoing]) -> AsyncIterator[Outgoing]:
    """Open and close in threads: an upload is read for its digest, a folder is packed."""
    outgoing = await asyncio.to_thread(opened.__enter__)
    try:
        yield outgoing
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


async def _pieces(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
