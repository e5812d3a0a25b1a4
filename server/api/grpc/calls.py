"""Limits the running gRPC calls per client and in total; calls that wait for a message make room for new ones.

gRPC only limits the total, and passes a unary call on only when its message has arrived. Therefore every call is
handled as a stream here: it counts from its head on, and this module waits for its messages, with a timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import EOF

from lathe.server.api.grpc.connections import Connection
from lathe.server.errors import BadRequest, Overloaded, RequestTimeout, ServerError

RESERVE = 64  # health checks beyond the limit
TICK = 1.0  # seconds between two checks for calls that waited too long


class Call:
    """One running call, which receives its messages. A context manager: leaving the block counts the call out."""

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
        self._reading: asyncio.Task[Any] | None = None  # the task that waits for a message
        self._reason: ServerError | None = None
        self.client = client
        self.has_key = has_key
        self.patience = patience  # seconds to wait for a message
        self.pending = 0  # messages without an answer yet
        self.reserved = self.has_left = False
        self.since = 0.0  # start of the wait, in loop time

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.leave(self)
        if self._connection is not None:
            self._connection.end()

    def attach(self, connection: Connection) -> None:
        """Attach the call to its connection, which is not idle until the call ends."""
        self._connection = connection
        connection.begin(has_key=self.has_key)

    def _why(self) -> ServerError | None:
        """The error that ends the call; None if it is not being ended."""
        return self._reason

    async def receive(self, context: Any) -> Any:
        """The next message as bytes, EOF after the last. Raises the error by which the call is ended (`end`).

        That is RequestTimeout after `patience` seconds without a message while nothing is to answer, and Overloaded if
        the call makes room for another one.
        """
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
            self._calls.stop_waiting(self)
        self.pending += 1
        return message

    async def one(self, context: Any) -> bytes:
        """The single message of a unary call; BadRequest if there is none, and the errors of `receive`."""
        message = await self.receive(context)
        if message is EOF:
            raise BadRequest("message: expected one, got none")
        return bytes(message)

    async def each(self, context: Any) -> AsyncIterator[bytes]:
        """Yield the messages of a streaming call; raises the errors of `receive`."""
        while (message := await self.receive(context)) is not EOF:
            yield message

    def answered(self) -> None:
        """Note that one message has been answered."""
        self.pending -= 1

    def end(self, reason: ServerError) -> None:
        """End a call: `receive` raises this error, at once if the call waits for a message, otherwise the next time."""
        self._reason = reason
        if self._reading is not None:
            self._reading.cancel()


class _Client:
    __slots__ = ("calls", "waiting")

    def __init__(self) -> None:
        self.calls = 0
        self.waiting: dict[Call, None] = {}


class Calls:
    """All running calls of one server. Used on the event loop's thread only."""

    def __init__(self, most: int, each: int) -> None:
        """`most`: calls in total; `each`: calls per client, which is a key, or an address if no key is needed."""
        self.most = most
        self.each = each
        self._taken = 0
        self._clients: dict[str, _Client] = {}
        self._waiting: dict[Call, None] = {}  # calls that wait for a message, longest first
        self._reserve: dict[Call, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """End the calls that waited too long and have nothing to answer, now and every `TICK` seconds.

        Call it on the event loop.
        """
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK, self.start)
        now = loop.time()
        for call in [call for call in self._waiting if not call.pending and now - call.since > call.patience]:
            call.end(RequestTimeout(f"no message arrived for {call.patience:g} seconds"))

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def enter(self, client: str, patience: float, *, has_key: bool, is_health: bool = False) -> Call:
        """Count a new call in and return it; Overloaded if its client or the server is at its limit.

        To make room, a call is ended that waits for a message and has nothing to answer: at the client's limit one of
        its own, at the server's limit one without a key. If there is none, health checks use the reserve instead, from
        which the oldest health check is ended if it is full. `patience`: seconds that a call may wait for a message.
        """
        call = Call(self, client, patience, has_key=has_key)
        known = self._clients.get(client)
        refusal = None
        if known is not None and known.calls >= self.each:
            if not self._make_room(known.waiting, keys=True):
                refusal = Overloaded(f"this client has reached its limit of {self.each} calls", retry_after=1)
        elif self._taken >= self.most and not self._make_room(self._waiting, keys=False):
            refusal = Overloaded(f"the server has reached its limit of {self.most} calls", retry_after=1)
        if refusal is None:
            self._taken += 1
            self._clients.setdefault(client, _Client()).calls += 1
        elif is_health:
            self._reserve_call(call)
        else:
            raise refusal
        return call

    def leave(self, call: Call) -> None:
        """Count out a call that has ended."""
        if call.reserved:
            self._reserve.pop(call, None)
            return
        if call.has_left:  # counted out already, to make room
            return
        call.has_left = True
        client = self._clients[call.client]
        self._taken -= 1
        client.calls -= 1
        if not client.calls:
            del self._clients[call.client]

    def wait(self, call: Call) -> None:
        """Note that a call begins to wait for a message."""
        call.since = asyncio.get_running_loop().time()
        self._waiting[call] = None
        client = self._clients.get(call.client)
        if client is not None and not (call.reserved or call.has_left):
            client.waiting[call] = None

    def stop_waiting(self, call: Call) -> None:
        """Note that a call no longer waits."""
        self._waiting.pop(call, None)
        client = self._clients.get(call.client)
        if client is not None:
            client.waiting.pop(call, None)

    def _reserve_call(self, call: Call) -> None:
        if len(self._reserve) >= RESERVE:
            oldest = next(iter(self._reserve))
            del self._reserve[oldest]
            oldest.end(_crowded_out())
        call.reserved = True
        self._reserve[call] = None

    def _make_room(self, waiting: dict[Call, None], *, keys: bool) -> bool:
        for call in waiting:
            if not (call.pending or call.reserved) and (keys or not call.has_key):
                self.stop_waiting(call)
                call.end(_crowded_out())
                self.leave(call)
                return True
        return False


def _crowded_out() -> Overloaded:
    return Overloaded("the call waited for a message and was ended to make room for others", retry_after=1)
