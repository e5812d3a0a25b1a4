"""Many clients that send or read almost nothing.

Of every four clients one is silent, one is inside a request's head, one inside a body, and one reads a byte per turn of
the many responses that it requested.

python -m loadtest.slow_clients URL MODEL COUNT     until it is killed; writes a line after all have connected

A plain loop over sockets visits the clients at even intervals, since independent clients do not all send at the same
moment.
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
BODY = 1 << 20  # announced bytes of a body that is never completed
ASKED, SMALL = 64, 4096  # pipelined requests with large responses; bytes of the receive buffer


class SlowClient:
    """One client, which reconnects when the server drops it.

    It sends `head` when it connects, then one byte per turn; with an empty `head` it sends nothing. `source` is its
    local address.
    """

    def __init__(self, address: tuple[str, int], head: bytes, source: str = "") -> None:
        self._address, self._head, self._source = address, head, source
        self._socket: socket.socket | None = None

    def turn(self) -> None:
        """Connect, or send one more byte."""
        with contextlib.suppress(OSError):
            if self._socket is None:
                self._socket = self._new_connection()
                self._socket.setblocking(False)
                self._socket.send(self._head)
            elif self._head:
                self._socket.send(b"a")
        self._close_if_dropped()

    def _new_connection(self) -> socket.socket:
        return socket.create_connection(self._address, source_address=(self._source, 0))

    def _is_dropped(self, connection: socket.socket) -> bool:
        try:
            while connection.recv(1 << 16):
                continue
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _close_if_dropped(self) -> None:
        """Close a connection that the server has closed."""
        if self._socket is not None and self._is_dropped(self._socket):
            self._socket.close()
            self._socket = None


class SlowReader(SlowClient):
    """A client that pipelines many requests and reads one byte per turn."""

    def turn(self) -> None:
        """Connect and send the requests, or read one more byte."""
        if self._socket is None:
            super().turn()
        else:
            self._close_if_dropped()

    def _new_connection(self) -> socket.socket:
        found = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        found.connect(self._address)
        return found

    def _is_dropped(self, connection: socket.socket) -> bool:
        try:
            return not connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True


def slow_clients(url: str, model: str, count: int) -> list[SlowClient]:
    target = Target(url)
    address, path = (target.host, target.port), f"/v2/models/{quote(model)}/infer HTTP/1.1"
    head = f"POST {path}\r\nhost: {target.authority}\r\n"
    pieces = [b"", f"{head}x-slow: ".encode(), f'{head}content-length: {BODY}\r\n\r\n{{"inputs":'.encode()]
    asked = f"GET /openapi.json HTTP/1.1\r\nhost: {target.authority}\r\n\r\n".encode() * ASKED
    return [
        SlowReader(address, asked) if index % 4 == 3 else SlowClient(address, pieces[index % 4])
        for index in range(count)
    ]


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
