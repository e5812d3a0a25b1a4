"""The sockets of gRPC's connections: it accepts them and shows Python none, but they are this process's files."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable
from typing import NamedTuple

from server.access.addresses import plain_address

FOLDERS = "/proc/self/fd", "/dev/fd"  # where systems list a process's descriptors


class Peer(NamedTuple):
    """A connection's other end; of IPv6 without the zone."""

    address: str
    port: int


def peers(port: int) -> dict[Peer, int]:
    """Return the descriptor of each connection that was accepted at this port, of any address of this machine.

    Nothing where the system lists no descriptors. One that is closed meanwhile, and perhaps opened again, is merely
    looked at. Takes 3 microseconds for each descriptor of the process, during most of which other threads run.
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


def shut(port: int, victims: Iterable[tuple[Peer, int]]) -> None:
    """End connections that :func:`peers` has found. gRPC sees that their clients have gone, and closes them."""
    for peer, fd in victims:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:  # its own: no other meanwhile
            if _peer(found.fileno(), port) == peer:
                found.shutdown(socket.SHUT_RDWR)


def _peer(fd: int, port: int) -> Peer | None:
    """Return whose connection to the port this is; None for any other file."""
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
        return None  # it listens, or is closed by now
    finally:
        found.detach()
    return Peer(plain_address(address), its_port)
