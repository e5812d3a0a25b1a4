"""How Lathe's connection reads a stream: its own protocol class on a real socket, observed from inside."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

from uvicorn._types import ASGIReceiveCallable, ASGISendCallable

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.connection import protocol
from lathe.server.api.connection.hub import Hub
from lathe.server.api.connection.inbox import BODY, CLOSED, COLLECTING, DISCARDING, HEAD, IDLE, Inbox, Phase
from lathe.server.api.connection.outbox import Outbox
from lathe.server.api.connection.protocol import LatheProtocol
from lathe.server.api.connection.request_head import RequestHead
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.api.inference.infer import InferCall
from lathe.server.errors import ServerError
from lathe.server.serve import make_server
from lathe.server.settings import Settings
from tests.server.api.connection.differential.readers import End, Reading, request
from tests.server.fakes import application, doubler
from tests.server.server_thread import in_a_thread

PATIENCE = 60.0  # seconds for all streams of a batch to be read and answered
CHANGES = (
    {(IDLE, HEAD), (HEAD, BODY), (BODY, IDLE), (IDLE, COLLECTING), (COLLECTING, IDLE)}
    | {(phase, DISCARDING) for phase in (HEAD, BODY, COLLECTING)}
    | {(phase, CLOSED) for phase in Phase}
)  # the transitions of `Phase`
_ANSWER = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")


@dataclass
class Seen:
    """A request whose head was accepted; `body` is set once it is complete."""

    method: bytes
    target: bytes
    body: bytes | None = None


class ObservedOutbox(Outbox):
    """Records each accepted request."""

    calls: ClassVar[dict[int, Seen]] = {}  # by the identity of a call that has not been started
    targets: ClassVar[dict[int, tuple[CallHead, bytes]]] = {}  # of heads that may be remembered

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seen: list[Seen] = []
        self.parsed: RequestHead | None = None  # while its turn is opened

    def open(self, head: CallHead) -> InferCall:
        call = super().open(head)
        if head.model:  # otherwise the head belongs to the answer of a refused request
            if self.parsed is not None:
                self.targets[id(head)] = head, self.parsed.target
            self.calls[id(call)] = self._note(b"POST", self.targets[id(head)][1])
        return call

    def repeat(self, template: RequestTemplate, data: bytes, request: bytes) -> None:
        self._note(b"POST", self.targets[id(template.head)][1]).body = request[request.find(b"\r\n\r\n") + 4 :]
        super().repeat(template, data, request)

    def open_cycle(self, cycle: Any) -> None:
        assert self.parsed is not None
        cycle.scope["seen"] = self._note(self.parsed.method, self.parsed.target)
        super().open_cycle(cycle)

    def _note(self, method: bytes, target: bytes) -> Seen:
        self.seen.append(Seen(method, target))
        return self.seen[-1]


class ObservedInbox(Inbox):
    """Hands each parsed head to the observed outbox, and records the first refusal and all changes of phase."""

    changes: ClassVar[set[tuple[Phase, Phase]]] = set()

    @property  # type: ignore[override]
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, new: Phase) -> None:
        before, self._phase = getattr(self, "_phase", new), new
        if new is not before:
            self.changes.add((before, new))

    def __init__(self, hub: Hub, outbox: ObservedOutbox, *others: Any) -> None:
        super().__init__(hub, outbox, *others)
        self.outbox = outbox
        self.refused: ServerError | None = None

    def on_head(self, head: RequestHead) -> None:
        self.outbox.parsed = head
        super().on_head(head)
        self.outbox.parsed = None

    def reject(self, error: ServerError) -> None:
        self.outbox.parsed = None
        self.refused = self.refused or error
        super().reject(error)


class Observed(LatheProtocol):
    """Can read its bytes in small pieces, and says how it has read them."""

    by_port: ClassVar[dict[int, Observed]] = {}
    pieces: ClassVar[dict[int, int]] = {}  # by client port: how many bytes to read at once
    inbox: ObservedInbox
    outbox: ObservedOutbox

    def connection_made(self, transport: Any) -> None:
        self.received = 0
        self.lost = False
        with patch.object(protocol, "Inbox", ObservedInbox), patch.object(protocol, "Outbox", ObservedOutbox):
            super().connection_made(transport)
        assert self.client is not None
        self.by_port[self.client[1]] = self

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True

    def data_received(self, data: bytes) -> None:
        assert self.client is not None
        step = self.pieces.get(self.client[1], len(data))
        for at in range(0, len(data), step):
            super().data_received(data[at : at + step])
        self.received += len(data)

    @property
    def is_settled(self) -> bool:
        """Whether reading has no further effects: all is answered but the request that is still being received."""
        turns = self.outbox.turns
        return self.lost or not turns or (self.inbox.is_receiving and turns[0] is self.inbox.request)

    def between_calls(self, size: int) -> Reading | None:
        """The result for a stream of `size` bytes; None while it may still change.

        It runs between two calls of the event loop: within one, an answer may be written and its connection not
        closed yet."""
        seen: Future[Reading | None] = Future()

        def look() -> None:
            whole = (self.received >= size or self.lost) and self.is_settled
            seen.set_result(self.reading() if whole else None)

        self.loop.call_soon_threadsafe(look)
        return seen.result(PATIENCE)

    def reading(self) -> Reading:
        """How Lathe read the stream."""
        whole = []
        for seen in self.outbox.seen:
            if seen.body is None:
                break
            whole.append(request(seen.method, seen.target, seen.body))
        if self.inbox.refused is not None:
            end = End.REFUSED
        elif self.lost or self.transport.is_closing():
            end = End.CLOSED
        else:
            end = End.WAITING if self.inbox.is_receiving else End.IDLE
        return Reading(tuple(whole), end)


@dataclass
class Recorder:
    """An ASGI wrapper that reads each body to its end, and answers."""

    app: Any
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.app.state

    async def __call__(self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = b""
        while True:
            message: Any = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        scope["seen"].body = body
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@dataclass(frozen=True)
class Outcome:
    """How Lathe read a stream, and the error of its refusal."""

    reading: Reading
    error: str = ""
    answered: tuple[int, bool] = (0, False)  # the last status; whether it said that the connection ends


@dataclass
class Lathe:
    """A server under observation."""

    port: int

    def read(self, streams: Sequence[bytes], pieces: Sequence[int] = ()) -> list[Outcome]:
        """Send each stream over its own connection; `pieces` limits the bytes per read of each connection."""
        clients = [socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) for _ in streams]
        try:
            ports = [client.getsockname()[1] for client in clients]
            Observed.pieces.update(zip(ports, pieces, strict=False))
            for client, data in zip(clients, streams, strict=True):
                with suppress(ConnectionError):  # refused before all of it was sent
                    client.sendall(data)
            return [self._outcome(*it) for it in zip(clients, ports, streams, strict=True)]
        finally:
            for client in clients:
                client.close()
            Observed.pieces.clear()

    @staticmethod
    def _outcome(client: socket.socket, port: int, data: bytes) -> Outcome:
        end = time.monotonic() + PATIENCE
        while True:
            observed = Observed.by_port.get(port)
            if observed is not None and (found := observed.between_calls(len(data))) is not None:
                break
            assert time.monotonic() < end, f"not read and answered in time: {data[:200]!r}"
            time.sleep(0.0005)
        del Observed.by_port[port]
        reading, refused = found, observed.inbox.refused
        if refused is None:
            return Outcome(reading)
        answers = b""
        with suppress(ConnectionError):
            while part := client.recv(1 << 16):
                answers += part
        *_, last = _ANSWER.finditer(answers)
        return Outcome(reading, refused.message, (int(last[1]), b"connection: close" in last[2].lower()))


@contextmanager
def observed_lathe() -> Iterator[Lathe]:
    """A server whose every request is recorded and answered, and whose inferences run."""
    settings = Settings(port=0, drain_timeout=2, served_hosts="*", header_timeout=600, body_timeout=600)
    app, _, _ = application(settings, {"doubler": doubler()})
    start = InferCall.start

    def noted(call: InferCall, body: bytes | bytearray) -> None:
        if (seen := ObservedOutbox.calls.pop(id(call), None)) is not None:
            seen.body = bytes(body)
        start(call, body)

    with patch.object(InferCall, "start", noted), in_a_thread(make_server(Recorder(app), settings, Observed)) as port:  # type: ignore[arg-type]
        yield Lathe(port)
    assert ObservedInbox.changes <= CHANGES
