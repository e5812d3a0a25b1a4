"""Accepts connections: counted from the first moment, never with the last file descriptors.

uvicorn would leave this to the event loop, which tells of a connection once its TLS handshake is over, and closes
connections without a word when descriptors run out.
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

from server import descriptors
from server.access.addresses import client_of
from server.api.slots import Slot, Slots

AT_ONCE = 16  # connections accepted before others get their turn on the event loop
PAUSE = 0.05  # seconds without accepting once descriptors have run out
WARNED = 10.0  # seconds between two lines about that
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

ProtocolOf: TypeAlias = Callable[[Slot], asyncio.Protocol]

log = logging.getLogger("lathe.server")


class Accepted(socket.socket):
    """A connection's socket; its slot is given back together with its descriptor, whoever closes it and why."""

    slot: Slot

    def close(self) -> None:
        """Close the descriptor."""
        super().close()
        self.slot.free()

    def detach(self) -> int:
        """Give up the descriptor; uvloop does so when it closes one itself."""
        self.slot.free()
        return super().detach()


class Listener:
    """Listens on some sockets from its making until :meth:`close`; needs a running event loop."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        slots: Slots,
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
        self._highest = descriptors.limit() - descriptors.KEPT  # of the descriptors that connections may have
        self._warned = float("-inf")
        self._setting_up: dict[asyncio.Task[None], Accepted] = {}
        self._resuming: asyncio.TimerHandle | None = None
        self._aside: tuple[socket.socket, Any] | None = None  # a connection whose descriptor is not for connections
        self._resume()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self._loop

    def close(self) -> None:
        """Listen no more; connections stay, but for those whose TLS handshake is under way."""
        if self._resuming is not None:
            self._resuming.cancel()
        if self._aside is not None:
            self._aside[0].close()
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()
        for task in tuple(self._setting_up):
            task.cancel()

    async def wait_closed(self) -> None:
        """Return once nothing is being set up."""
        if self._setting_up:
            await asyncio.wait(tuple(self._setting_up))

    # accepting

    def _resume(self) -> None:
        if self._aside is not None:
            (high, address), self._aside = self._aside, None
            with high, contextlib.suppress(OSError):
                lower = high.dup()  # in place of a connection that has made room
                if lower.fileno() < self._highest:
                    self._set_up(lower, address)
                else:
                    lower.close()
        for listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _pause(self, why: str) -> None:
        """Accept nothing for a moment: clients wait in the system's queue instead of being turned away."""
        for listening in self.sockets:
            self._loop.remove_reader(listening)
        self._resuming = self._loop.call_later(PAUSE, self._resume)
        now = time.monotonic()
        if now - self._warned >= WARNED:
            self._warned = now
            log.error(
                "file descriptors run out (%s; this process may have %d, %d of them for other things than "
                "connections): new connections wait",
                why,
                self._highest + descriptors.KEPT,
                descriptors.KEPT,
            )

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._slots.make_room()
                    self._pause(error.strerror or "")
                    return
                continue  # this one was reset before it was accepted
            if accepted.fileno() < self._highest:  # the lowest free one, so all below are in use
                self._set_up(accepted, address)
                continue
            self._slots.make_room()
            self._aside = accepted, address
            self._pause(f"{self._slots.taken} connections")
            return

    def _set_up(self, accepted: socket.socket, address: Any) -> None:
        accepted.setblocking(False)
        connection = Accepted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        slot = connection.slot = self._slots.take(client_of(address[0]), _nothing)
        task = self._loop.create_task(self._connect(connection))
        if self._tls is not None:  # without, it is there in a moment, and must not be left half made
            slot.close = task.cancel
        self._setting_up[task] = connection
        task.add_done_callback(self._was_set_up)

    def _was_set_up(self, task: asyncio.Task[None]) -> None:
        connection = self._setting_up.pop(task)
        if task.cancelled():  # perhaps before it began
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
        if slot.is_free:  # it had to make room meanwhile
            transport.abort()


def _nothing() -> object:
    return None


async def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen on each address of the host; raises OSError."""
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
