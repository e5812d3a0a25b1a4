"""The calls under way, and which of them make room for others: one client cannot have all.

gRPC counts calls, too, but not whose they are, and hands over a unary call only once its message is there. So every
call is taken as a stream here: it counts from its head on, and its messages are waited for in here, for so long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import EOF

from server.api.grpc.connections import Connection
from server.errors import BadRequest, Overloaded, RequestTimeout, ServerError

RESERVE = 64  # calls of health beyond the limit
TICK = 1.0  # seconds between two looks for calls that have waited for too long


class Call:
    """One call under way; leaving the block ends it."""

    __slots__ = (
        "_calls",
        "_connection",
        "_reading",
        "_reason",
        "client",
        "has_key",
        "has_left",
        "patience",
        "pending",
        "reserved",
        "since",
    )

    def __init__(self, calls: Calls, client: str, patience: float, *, has_key: bool) -> None:
        self._calls = calls
        self._connection: Connection | None = None
        self._reading: asyncio.Task[Any] | None = None  # while a message is waited for
        self._reason: ServerError | None = None
        self.client = client
        self.has_key = has_key
        self.patience = patience  # seconds that a message is waited for
        self.pending = 0  # messages that are not answered
        self.reserved = self.has_left = False
        self.since = 0.0  # when the wait began, in loop time

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.leave(self)
        if self._connection is not None:
            self._connection.end()

    def sit_on(self, connection: Connection) -> None:
        """Say over which connection it came, which is not idle until it ends."""
        self._connection = connection
        connection.begin(has_key=self.has_key)

    def _why(self) -> ServerError | None:
        """Return what was said to a call that is being ended."""
        return self._reason

    async def receive(self, context: Any) -> Any:
        """Return the next message, EOF after the last; raises RequestTimeout, or Overloaded if others need the room."""
        if self._reason is not None:
            raise self._reason
        task = self._reading = asyncio.current_task()
        self._calls.wait(self)
        try:
            message = await context.read()
        except asyncio.CancelledError:
            reason = self._why()
            if reason is None or task is None or task.uncancel():
                raise  # the caller has left
            raise reason from None
        finally:
            self._reading = None
            self._calls.go_on(self)
        self.pending += 1
        return message

    async def one(self, context: Any) -> bytes:
        """Return the message of a call that has one; raises BadRequest where there is none."""
        message = await self.receive(context)
        if message is EOF:
            raise BadRequest("message: expected one, got none")
        return bytes(message)

    async def each(self, context: Any) -> AsyncIterator[bytes]:
        """Yield the messages of a stream."""
        while (message := await self.receive(context)) is not EOF:
            yield message

    def answered(self) -> None:
        """One message has its answer."""
        self.pending -= 1

    def end(self, reason: ServerError) -> None:
        """End the call, which waits for a message."""
        self._reason = reason
        if self._reading is not None:
            self._reading.cancel()


class _Client:
    __slots__ = ("calls", "waiting")

    def __init__(self) -> None:
        self.calls = 0
        self.waiting: dict[Call, None] = {}


class Calls:
    """All calls of one server; for the event loop's thread alone."""

    def __init__(self, most: int, each: int) -> None:
        """``most`` calls at once, ``each`` of one client: a key, or an address where no key is needed."""
        self.most = most
        self.each = each
        self._taken = 0
        self._clients: dict[str, _Client] = {}
        self._waiting: dict[Call, None] = {}  # for a message, longest first
        self._reserve: dict[Call, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to end calls that wait for too long; call on the event loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK, self.start)
        now = loop.time()
        for call in [call for call in self._waiting if not call.pending and now - call.since > call.patience]:
            call.end(RequestTimeout(f"no message came for {call.patience:g} seconds"))

    def stop(self) -> None:
        """End no more of them."""
        if self._timer is not None:
            self._timer.cancel()

    def enter(self, client: str, patience: float, *, has_key: bool, is_health: bool = False) -> Call:
        """Return a call that begins; raises Overloaded where its client or the server has no room for it.

        One that waits for a message and has nothing to answer ends to make room, but none of another client's key.
        """
        call = Call(self, client, patience, has_key=has_key)
        known = self._clients.get(client)
        refusal = None
        if known is not None and known.calls >= self.each:
            if not self._make_room(known.waiting, keys=True):
                refusal = Overloaded(f"this client has {self.each} calls under way, as many as one may", retry_after=1)
        elif self._taken >= self.most and not self._make_room(self._waiting, keys=False):
            refusal = Overloaded(f"{self.most} calls are under way, as many as may", retry_after=1)
        if refusal is None:
            self._taken += 1
            self._clients.setdefault(client, _Client()).calls += 1
        elif is_health:
            self._reserved(call)
        else:
            raise refusal
        return call

    def leave(self, call: Call) -> None:
        """A call has ended."""
        if call.reserved:
            self._reserve.pop(call, None)
            return
        if call.has_left:  # at once, to make room
            return
        call.has_left = True
        client = self._clients[call.client]
        self._taken -= 1
        client.calls -= 1
        if not client.calls:
            del self._clients[call.client]

    def wait(self, call: Call) -> None:
        """A call waits for a message from now on."""
        call.since = asyncio.get_running_loop().time()
        self._waiting[call] = None
        client = self._clients.get(call.client)
        if client is not None and not (call.reserved or call.has_left):
            client.waiting[call] = None

    def go_on(self, call: Call) -> None:
        """A call waits no longer."""
        self._waiting.pop(call, None)
        client = self._clients.get(call.client)
        if client is not None:
            client.waiting.pop(call, None)

    def _reserved(self, call: Call) -> None:
        if len(self._reserve) >= RESERVE:
            oldest = next(iter(self._reserve))
            del self._reserve[oldest]
            oldest.end(_crowded_out())
        call.reserved = True
        self._reserve[call] = None

    def _make_room(self, waiting: dict[Call, None], *, keys: bool) -> bool:
        for call in waiting:
            if not (call.pending or call.reserved) and (keys or not call.has_key):
                self.go_on(call)
                call.end(_crowded_out())
                self.leave(call)
                return True
        return False


def _crowded_out() -> Overloaded:
    return Overloaded("the call waited for a message, and others needed its room", retry_after=1)
