"""A server process with few file descriptors, for `test_descriptors.py`.

`python -m tests.server.api.connection.few_descriptors LIMIT fitted|unfitted` prints its port and the number of
connections it serves. An unfitted server does not adapt its limits to the descriptors.
"""

from __future__ import annotations

import resource
import socket
import sys

from lathe.server.processes import descriptors
from lathe.server.serve import LatheServer, make_server
from lathe.server.settings import Settings
from lathe.server.telemetry.logs import configure
from tests.server.fakes import application, doubler


def main(limit: int, how: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    configure("text", "info")
    settings = Settings(port=0, drain_timeout=1, header_timeout=60)
    if how == "fitted":
        settings = descriptors.fit_connections(settings)
    else:
        descriptors.raise_limit()
    app, _, _ = application(settings, {"doubler": doubler()})
    Announcing(make_server(app, settings).config, app).run()


class Announcing(LatheServer):
    """Prints the port on which it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        most = self.lifespan.state["hub"].slots.most
        print(self.servers[0].sockets[0].getsockname()[1], most, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
