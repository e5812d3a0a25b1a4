"""Answers that the system holds for a client which does not read them.

A closed connection's answers stay in the system's memory, megabytes of each, for as long as the client acknowledges
that it takes nothing (state FIN-WAIT-1). A reset gives that memory back.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios


def close(transport: asyncio.Transport) -> None:
    """Close a connection whose client has had time to take all of its answers; reset it where it has not."""
    if _is_undelivered(transport.get_extra_info("socket")):
        reset(transport)
    else:
        transport.close()


def reset(transport: asyncio.Transport) -> None:
    """Close a connection without what its client has not taken."""
    connection: socket.socket = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _is_undelivered(connection: socket.socket) -> bool:
    (size,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    return bool(size > 0)
