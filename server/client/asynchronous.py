"""The asyncio client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from lathe.server.client.call import AsyncSender, Call, OpenedCall
from lathe.server.client.connection import Connection
from lathe.server.client.errors import ClientError
from lathe.server.client.event_stream import PAUSE, JobFollower
from lathe.server.client.inference import InferenceOperations
from lathe.server.client.models import ModelOperations
from lathe.server.client.training import TrainingOperations
from lathe.server.sse import JobEvent

T = TypeVar("T")


class AsyncClient(ModelOperations, InferenceOperations, TrainingOperations, AsyncSender):
    """An asyncio client of one server, for one event loop, with the arguments and operations of `Client`.

    Operations are awaited; `job_events` is iterated with `async for`. Files are read in threads, so that the event loop
    is not blocked. `close` closes its connections; so does leaving it as an asynchronous context manager.
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
        connection = Connection.of(url, timeout, upload_timeout, patience, api_key, ca, cert, cert_key, verify)
        self._connection = connection
        self._http = httpx.AsyncClient(**connection.arguments, transport=transport)
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
        """Yield a job's events until it ends, from its start or after the event with the id `after`.

        Reconnects after lost connections; raises ClientError after more than 10 in a row, ApiError for a refusal.
        """
        following = JobFollower(job, after)
        while True:
            try:
                async for event in self._events(following):
                    yield event
            except httpx.HTTPError as error:
                following.lost(error)
            else:
                if (await self.job(job)).state.is_final:  # otherwise the server ended the stream because it stops
                    return
            await asyncio.sleep(PAUSE)

    async def _events(self, following: JobFollower) -> AsyncIterator[JobEvent]:
        async with self._http.stream("GET", following.path, headers=following.headers) as response:
            if not response.is_success:
                await response.aread()
                raise following.refused(response)
            async for line in response.aiter_lines():
                if event := following.take(line):
                    yield event

    async def run(self, call: Call[T]) -> T:
        patience = self._connection.retry_policy(call, self._has_answered)
        async with _enter_in_thread(call.open_body()) as outgoing:
            while True:
                outcome = await self._attempt(call, outgoing)
                pause = patience.pause_before_next(outcome)
                if pause is None:
                    break
                await asyncio.sleep(pause)
        if isinstance(outcome, httpx.HTTPError):
            raise self._connection.failure(call, outcome) from outcome
        return call.result(outcome)

    async def _attempt(self, call: Call[Any], outgoing: OpenedCall) -> httpx.Response | httpx.HTTPError:
        content = call.content if outgoing.body is None else _read_in_thread(outgoing.pieces(outgoing.body))
        options = self._connection.options(call, outgoing, content)
        try:
            response = await self._http.request(call.method, call.path, **options)
        except httpx.HTTPError as error:
            return error
        except UnicodeEncodeError as error:
            raise ClientError(f"{call}: {error.object[:80]!r}: expected text in UTF-8") from error
        self._has_answered = True
        return response


@asynccontextmanager
async def _enter_in_thread(manager: AbstractContextManager[OpenedCall]) -> AsyncIterator[OpenedCall]:
    """A context manager that enters and leaves `manager` in threads, and yields its value.

    Entering takes long: an upload is read for its digest, and a folder is packed.
    """
    outgoing = await asyncio.to_thread(manager.__enter__)
    try:
        yield outgoing
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def _read_in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
