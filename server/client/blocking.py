"""The blocking client."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from lathe.server.client.call import Call, OpenedCall, Sender
from lathe.server.client.connection import Connection
from lathe.server.client.errors import ClientError
from lathe.server.client.event_stream import PAUSE, JobFollower
from lathe.server.client.inference import InferenceOperations
from lathe.server.client.models import ModelOperations
from lathe.server.client.training import TrainingOperations
from lathe.server.sse import JobEvent

T = TypeVar("T")


class Client(ModelOperations, InferenceOperations, TrainingOperations, Sender):
    """A blocking client of one server. Threads may share it.

    `close` closes its connections; so does leaving it as a context manager.

    `url`, `api_key`, `ca` (a file with the CA certificate that signed the server's), `cert` and `cert_key` (files of
    the client certificate) default to the variables LATHE_URL, LATHE_KEY, LATHE_CA, LATHE_CERT and LATHE_CERT_KEY.
    `timeout` (seconds) limits every wait, except for uploads and compilations, which `upload_timeout` limits. A
    repeatable request is retried for up to `patience` seconds while the server is overloaded or restarts; 0: never.
    `verify` and `transport` are those of httpx; the variables of certificates count only if `verify` is True. Raises
    ClientError for a URL, an API key or certificates that cannot be used.

    The argument `key` of an operation is its idempotency key, at most 255 visible ASCII characters: a repetition with
    the same key returns the first answer, and makes no second change. Without `key` the client makes a random one.
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        connection = Connection.of(url, timeout, upload_timeout, patience, api_key, ca, cert, cert_key, verify)
        self._connection = connection
        self._http = httpx.Client(**connection.arguments, transport=transport)
        self._has_answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def job_events(self, job: str, *, after: str = "") -> Iterator[JobEvent]:
        """Yield a job's events until it ends, from its start or after the event with the id `after`.

        Reconnects after lost connections; raises ClientError after more than 10 in a row, ApiError for a refusal.
        """
        following = JobFollower(job, after)
        while True:
            try:
                yield from self._events(following)
            except httpx.HTTPError as error:
                following.lost(error)
            else:
                if self.job(job).state.is_final:  # otherwise the server ended the stream because it stops
                    return
            time.sleep(PAUSE)

    def _events(self, following: JobFollower) -> Iterator[JobEvent]:
        with self._http.stream("GET", following.path, headers=following.headers) as response:
            if not response.is_success:
                response.read()
                raise following.refused(response)
            for line in response.iter_lines():
                if event := following.take(line):
                    yield event

    def run(self, call: Call[T]) -> T:
        patience = self._connection.retry_policy(call, self._has_answered)
        with call.open_body() as outgoing:
            while True:
                outcome = self._attempt(call, outgoing)
                pause = patience.pause_before_next(outcome)
                if pause is None:
                    break
                time.sleep(pause)
        if isinstance(outcome, httpx.HTTPError):
            raise self._connection.failure(call, outcome) from outcome
        return call.result(outcome)

    def _attempt(self, call: Call[Any], outgoing: OpenedCall) -> httpx.Response | httpx.HTTPError:
        content = call.content if outgoing.body is None else outgoing.pieces(outgoing.body)
        try:
            response = self._http.request(call.method, call.path, **self._connection.options(call, outgoing, content))
        except httpx.HTTPError as error:
            return error
        except UnicodeEncodeError as error:
            raise ClientError(f"{call}: {error.object[:80]!r}: expected text in UTF-8") from error
        self._has_answered = True
        return response
