"""One server process: listening, and stopping without losing what was accepted."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api.protocol import LatheProtocol
from server.settings import Settings

HEAPS = 2  # of the C library: the event loop has its own, all other threads share one
SWITCH = 0.001  # seconds a worker with a finished batch waits at most for the interpreter of a busy event loop


class LatheServer(uvicorn.Server):
    """uvicorn's server with an orderly end: unready at the first signal, and a stop on request is a success."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.setswitchinterval(SWITCH)
        gc.collect()
        gc.freeze()  # what is there now stays; scanning it again would only stall requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.plane.draining = True  # also when no signal asked for the end
        endpoint = self._app.state.grpc
        if endpoint:  # both drain at the same time
            stopping = asyncio.ensure_future(endpoint.stop())
            await super().shutdown(sockets)
            await stopping
        else:
            await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.state.plane.draining = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; unlike uvicorn, do not raise them again after a graceful stop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def make_server(app: FastAPI, settings: Settings, connection: type[HttpToolsProtocol] = LatheProtocol) -> LatheServer:
    """Return a server for the application, by default with Lathe's connection class."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=connection,
        ws="none",
        lifespan="on",
        interface="asgi3",
        access_log=False,  # Lathe writes its own
        log_config=None,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca else ssl.CERT_NONE,
        backlog=4096,
        timeout_graceful_shutdown=int(max(1, settings.drain_timeout)),
    )
    return LatheServer(config, app)
