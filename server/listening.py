"""Accepts connections: counts each from `accept` on, and keeps file descriptors in reserve.

uvicorn leaves this to the event loop. The event loop reports a connection only after its TLS handshake, and closes
connections silently when descriptors run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lathe.server.access.addresses import client_of
from lathe.server.api.connection.connection_slots import ConnectionSlot, ConnectionSlots
from lathe.server.processes import descriptors

ACCEPTS_PER_TURN = 16  # connections accepted per turn of the event loop
PAUSE = 0.05  # seconds without accepting after descriptors have run out
WARNING_INTERVAL = 10.0  # seconds between two log lines about descriptors that ran out
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

ProtocolOf: TypeAlias = Callable[[ConnectionSlot], asyncio.Protocol]

log = logging.getLogger("lathe.server")


class Accepted(socket.socket):
    """A connection's socket. Closing or detaching it frees `slot`, its place within the limit of connections."""

    slot: ConnectionSlot

    def close(self) -> None:
        """Close the descriptor and free the slot."""
        super().close()
        self.slot.free()

    def detach(self) -> int:
        """Give up the descriptor and free the slot; uvloop detaches sockets whose descriptors it closes itself."""
        self.slot.free()
        return super().detach()


class Listener:
    """Accepts connections on sockets that listen, from its creation until `close`, which also closes these sockets.

    Needs a running event loop. `handshake_timeout`: the longest TLS handshake, in seconds.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        slots: ConnectionSlots,
        protocol_of: ProtocolOf,
        tls: ssl.SSLContext | None = None,
        handshake_timeout: float | None = None,
    ) -> None:
        self.sockets = tuple(sockets)
        self._slots = slots
        self._protocol_of = protocol_of
        self._tls = tls
        self._handshake_timeout = handshake_timeout if tls else None
        self._loop = asyncio.get_running_loop()
        self._highest = descriptors.limit() - descriptors.RESERVED  # connections have descriptors below this number
        self._warned = float("-inf")
        self._setting_up: dict[asyncio.Task[None], Accepted] = {}
        self._resuming: asyncio.TimerHandle | None = None
        self._set_aside: tuple[socket.socket, Any] | None = (
            None  # a connection with a reserved descriptor, and its address
        )
        self._resume()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self._loop

    def close(self) -> None:
        """Stop listening, and close the sockets.

        Established connections stay open. Those in a TLS handshake, or that wait for a descriptor, are closed.
        """
        if self._resuming is not None:
            self._resuming.cancel()
        if self._set_aside is not None:
            self._set_aside[0].close()
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()
        for task in tuple(self._setting_up):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is being set up."""
        if self._setting_up:
            await asyncio.wait(tuple(self._setting_up))

    # accepting

    def _resume(self) -> None:
        if self._set_aside is not None:
            (high, address), self._set_aside = self._set_aside, None
            with high, contextlib.suppress(OSError):
                lower = high.dup()  # a lower descriptor is free once an evicted connection has closed
                if lower.fileno() < self._highest:
                    self._set_up(lower, address)
                else:
                    lower.close()
        for listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _pause(self, why: str) -> None:
        """Accept nothing for `PAUSE` seconds: clients wait in the system's backlog instead of being refused.

        Also logs that descriptors have run out, with the reason `why`, at most once per `WARNING_INTERVAL`.
        """
        for listening in self.sockets:
            self._loop.remove_reader(listening)
        self._resuming = self._loop.call_later(PAUSE, self._resume)
        now = time.monotonic()
        if now - self._warned >= WARNING_INTERVAL:
            self._warned = now
            log.error(
                "file descriptors have run out (%s; the limit of this process is %d, of which %d are reserved for "
                "other things than connections): new connections wait",
                why,
                self._highest + descriptors.RESERVED,
                descriptors.RESERVED,
            )

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._slots.make_room()
                    self._pause(error.strerror or "")
                    return
                continue  # the client reset this connection before it was accepted
            if accepted.fileno() < self._highest:  # accept returns the lowest free number, so all below are in use
                self._set_up(accepted, address)
                continue
            self._slots.make_room()
            self._set_aside = accepted, address
            self._pause(f"{self._slots.connection_count} connections")
            return

    def _set_up(self, accepted: socket.socket, address: Any) -> None:
        accepted.setblocking(False)
        connection = Accepted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        slot = connection.slot = self._slots.take(client_of(address[0]), _nothing)
        task = self._loop.create_task(self._connect(connection))
        if (
            self._tls is not None
        ):  # without TLS the task ends at once; cancelling would leave the connection half set up
            slot.close = task.cancel
        self._setting_up[task] = connection
        task.add_done_callback(self._on_set_up)

    def _on_set_up(self, task: asyncio.Task[None]) -> None:
        connection = self._setting_up.pop(task)
        if task.cancelled():  # perhaps before `_connect` started, which would not close it then
            connection.close()

    async def _connect(self, connection: Accepted) -> None:
        slot = connection.slot
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: self._protocol_of(slot),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout,
            )
        except OSError as error:  # of the TLS handshake
            log.debug("a connection of %s was not set up: %r", slot.client, error)
            connection.close()
            return
        slot.close = transport.abort
        if slot.is_free:  # the connection was evicted meanwhile
            transport.abort()


def _nothing() -> object:
    return None


async def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen on each address of the host, separately for IPv4 and IPv6; raises OSError.

    The caller must close them.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(backlog)
            listening.setblocking(False)
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return sockets
