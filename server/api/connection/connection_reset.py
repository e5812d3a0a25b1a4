"""Resets connections whose client does not read its answers, to free kernel memory.

After a normal close, the kernel keeps the unsent bytes, megabytes per connection, for as long as the client
acknowledges with a zero window (state FIN-WAIT-1). A reset frees that memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios


def close_or_reset(transport: asyncio.Transport) -> None:
    """Close a connection; reset it if the kernel still holds bytes that the client has not acknowledged."""
    if _is_undelivered(transport.get_extra_info("socket")):
        reset(transport)
    else:
        transport.close()


def reset(transport: asyncio.Transport) -> None:
    """Reset a connection: the kernel drops the bytes that the client has not acknowledged."""
    connection: socket.socket = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _is_undelivered(connection: socket.socket) -> bool:
    (size,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    return bool(size > 0)
