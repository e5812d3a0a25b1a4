"""A process with gRPC over a slow model: `python -m tests.server.api.grpc.standalone SECONDS`; prints gRPC's port."""

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
    settings = Settings(port=0, grpc_port=0, drain_timeout=5)
    app, _, _ = application(settings, {"doubler": model})
    Announcing(make_server(app, settings).config, app).run()


class Announcing(LatheServer):
    """Prints the port on which gRPC listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._app.state.grpc.port, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
