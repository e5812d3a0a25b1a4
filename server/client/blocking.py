"""The client that blocks."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from server.client.call import Call, Outgoing, Sender
from server.client.connection import Connection
from server.client.following import PAUSE, Following
from server.client.inference import InferenceOperations
from server.client.models import ModelOperations
from server.client.training import TrainingOperations
from server.sse import JobEvent

T = TypeVar("T")


class Client(ModelOperations, InferenceOperations, TrainingOperations, Sender):
    """One server. Threads may share a client.

    ``url``, ``api_key``, ``ca`` (file of the authority that signed the server's certificate), ``cert`` and ``cert_key``
    (files of the client's certificate) come from LATHE_URL, LATHE_KEY, LATHE_CA, LATHE_CERT and LATHE_CERT_KEY where
    they are not given.
    ``timeout`` (seconds) bounds every wait but those for uploads and for models to be compiled, which have
    ``upload_timeout``. For ``patience``
    seconds a request that may be repeated is sent again while the server is overloaded or restarts; 0: never.
    Raises ClientError for an address or certificates that cannot be used.
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
        given = Connection.of(url, timeout, upload_timeout, patience, api_key, ca, cert, cert_key, verify)
        self._connection = given
        self._http = httpx.Client(**given.arguments, transport=transport)
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
        """Follow a job until it has ended, from its start or after the event of that id; survives lost connections."""
        following = Following(job, after)
        while True:
            try:
                yield from self._events(following)
            except httpx.HTTPError as error:
                following.lost(error)
            else:
                if self.job(job).state.is_final:  # else the server is about to stop
                    return
            time.sleep(PAUSE)

    def _events(self, following: Following) -> Iterator[JobEvent]:
        with self._http.stream("GET", following.path, headers=following.headers) as response:
            if not response.is_success:
                response.read()
                raise following.refused(response)
            for line in response.iter_lines():
                if event := following.take(line):
                    yield event

    def run(self, call: Call[T]) -> T:
        patience = self._connection.patient(call, self._has_answered)
        with call.opened() as outgoing:
            while True:
                outcome = self._once(call, outgoing)
                pause = patience.before_next(outcome)
                if pause is None:
                    break
                time.sleep(pause)
        if isinstance(outcome, httpx.HTTPError):
            raise self._connection.failure(call, outcome) from outcome
        return call.result(outcome)

    def _once(self, call: Call[Any], outgoing: Outgoing) -> httpx.Response | httpx.HTTPError:
        content = call.content if outgoing.body is None else outgoing.pieces(outgoing.body)
        try:
            response = self._http.request(call.method, call.path, **self._connection.options(call, outgoing, content))
        except httpx.HTTPError as error:
            return error
        self._has_answered = True
        return response
