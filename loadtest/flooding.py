"""A flood of connections: silent ones, incomplete heads, TLS greetings, idle ones after a complete request.

python -m loadtest.flooding URL COUNT     until it is killed; writes a line after all have connected

At most COUNT connections are open, from sixteen addresses of the loopback network if the server is there. A connection
that the server drops is opened again at once.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Sequence

from loadtest.connection import Target
from loadtest.slow_clients import SlowClient

ADDRESSES = [f"127.0.1.{number}" for number in range(1, 17)]
PAUSE = 0.0005  # seconds between two turns: at most 2,000 connects per second
TLS_GREETING = b"\x16\x03\x01\x02\x00\x01"  # the beginning of a ClientHello of 512 bytes


class Flooder(SlowClient):
    """A client that sends its bytes once and holds the connection open."""

    def turn(self) -> None:
        """Connect and send, or check whether the connection is still open."""
        self._close_if_dropped()
        if self._socket is None:
            super().turn()


def flooders(url: str, count: int) -> list[Flooder]:
    target = Target(url)
    whole = f"GET /v2 HTTP/1.1\r\nhost: {target.authority}\r\n\r\n".encode()
    pieces = itertools.cycle([b"", whole[:-4], TLS_GREETING, whole])
    sources = itertools.cycle(ADDRESSES if target.host.startswith("127.") else [""])
    return [Flooder((target.host, target.port), next(pieces), next(sources)) for _ in range(count)]


def main(arguments: Sequence[str]) -> None:
    url, count = arguments
    clients = flooders(url, int(count))
    for client in clients:
        client.turn()
    print("connected", flush=True)
    for client in itertools.cycle(clients):
        time.sleep(PAUSE)
        client.turn()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
