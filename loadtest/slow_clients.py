"""Many clients that say next to nothing: half of them silent, half in the middle of a request's head.

python -m loadtest.slow_clients URL MODEL COUNT     until it is killed; writes a line once all have connected

A plain loop over sockets, one client after the other at even distances: independent clients do not all speak at the
same moment, and what they cost is to be the server's cost.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Sequence
from urllib.parse import quote

from loadtest.connection import Target

TRICKLE = 1.0  # seconds between two bytes


class SlowClient:
    """One client. Without a `head` it never says anything; whom the server drops comes again. `source`: its address."""

    def __init__(self, address: tuple[str, int], head: bytes, source: str = "") -> None:
        self._address, self._head, self._source = address, head, source
        self._socket: socket.socket | None = None

    def turn(self) -> None:
        """Connect, or say one byte more."""
        with contextlib.suppress(OSError):
            if self._socket is None:
                self._socket = socket.create_connection(self._address, source_address=(self._source, 0))
                self._socket.setblocking(False)
                self._socket.send(self._head)
            elif self._head:
                self._socket.send(b"a")
        if self._socket is not None and self._is_dropped(self._socket):
            self._socket.close()
            self._socket = None

    def _is_dropped(self, connection: socket.socket) -> bool:
        try:
            while connection.recv(1 << 16):
                continue
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def slow_clients(url: str, model: str, count: int) -> list[SlowClient]:
    target = Target(url)
    head = f"POST /v2/models/{quote(model)}/infer HTTP/1.1\r\nhost: {target.authority}\r\nx-slow: ".encode()
    return [SlowClient((target.host, target.port), head if index % 2 else b"") for index in range(count)]


def main(arguments: Sequence[str]) -> None:
    url, model, count = arguments
    clients = slow_clients(url, model, int(count))
    for client in clients:
        client.turn()
    print("connected", flush=True)
    for client in itertools.cycle(clients):
        time.sleep(TRICKLE / len(clients))
        client.turn()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
