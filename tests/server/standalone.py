"""A server process over a slow fake model: `python -m tests.server.standalone SECONDS`; prints its port."""

from __future__ import annotations

import socket
import sys
import time

from lathe.server.serve import LatheServer, make_server
from lathe.server.settings import Settings
from tests.server.fakes import application, doubler


def main(seconds: float) -> None:
    model = doubler()
    model.function = lambda tensors: (time.sleep(seconds), {"y": tensors["x"] * 2})[1]
    settings = Settings(port=0, drain_timeout=3)
    app, _, _ = application(settings, {"doubler": model})
    Announcing(make_server(app, settings).config, app).run()


class Announcing(LatheServer):
    """Prints the port on which it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
