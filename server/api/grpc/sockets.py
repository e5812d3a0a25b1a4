"""Finds and shuts down the sockets of gRPC connections, by the file descriptors of this process.

gRPC accepts connections in C and gives Python no access to them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable
from typing import NamedTuple

from lathe.server.access.addresses import plain_address

FOLDERS = "/proc/self/fd", "/dev/fd"  # folders that list the descriptors of a process: Linux, and others


class Peer(NamedTuple):
    """The client's end of a connection; an IPv6 address has no zone."""

    address: str
    port: int


def peers(port: int) -> dict[Peer, int]:
    """The file descriptor of each connection to this port, on any address of this machine, by the client's end.

    Empty if the system does not list descriptors. A descriptor that is closed or reused meanwhile does no harm, because
    it is only inspected. Takes 3 microseconds per descriptor of the process, mostly without the interpreter lock.
    """
    found: dict[Peer, int] = {}
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                peer = _peer(int(name), port)
                if peer is not None:
                    found[peer] = int(name)
            return found
    return found


def shut_down(port: int, victims: Iterable[tuple[Peer, int]]) -> None:
    """Shut down connections to this port that `peers` found, if they still have that descriptor; gRPC closes them."""
    for peer, fd in victims:
        # A duplicate cannot be reused for another file between the check and the shutdown.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            if _peer(found.fileno(), port) == peer:
                found.shutdown(socket.SHUT_RDWR)


def _peer(fd: int, port: int) -> Peer | None:
    """The client of a connection to this port; None for any other descriptor."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        found = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
            return None
        address, its_port, *_ = found.getpeername()
    except OSError:
        return None  # a listening socket, or closed by now
    finally:
        found.detach()
    peer = Peer(plain_address(address), its_port)
    if its_port == port and ipaddress.ip_address(peer.address).is_loopback:
        return None  # a client in this process whose own port happens to have the same number
    return peer
