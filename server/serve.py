"""One server process: listening, and stopping without losing what was accepted."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api.hub import Hub
from server.api.protocol import LatheProtocol
from server.api.slots import Slot
from server.listening import Listener, listen
from server.settings import Settings

HEAPS = 2  # of the C library: the event loop has its own, all other threads share one
MESSAGE = 80 << 20  # bytes: gRPC's copy of a message of 64 MiB, which grows by an eighth, is kept for the next one
SWITCH = 0.001  # seconds a worker with a finished batch waits at most for the interpreter of a busy event loop

log = logging.getLogger("lathe.server")


class LatheServer(uvicorn.Server):
    """uvicorn's server with an orderly end: unready at the first signal, and a stop on request is a success."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen; ``sockets`` that listen already are taken as they are."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config = self.config
        try:
            sockets = sockets or await listen(config.host, config.port, config.backlog)
        except OSError as error:
            log.error("%s", error)
            await self.lifespan.shutdown()
            sys.exit(STARTUP_FAILURE)
        hub: Hub = self.lifespan.state["hub"]
        listener = Listener(sockets, hub.slots, self._protocol, config.ssl, hub.settings.header_timeout)
        self.servers = [cast(asyncio.base_events.Server, listener)]
        self._log_started_message(sockets)
        self.started = True
        sys.setswitchinterval(SWITCH)
        gc.collect()
        gc.freeze()  # what is there now stays; scanning it again would only stall requests

    def _protocol(self, slot: Slot) -> asyncio.Protocol:
        state = self.lifespan.state
        kind = cast(type[HttpToolsProtocol], self.config.http_protocol_class)
        made = kind(config=self.config, server_state=self.server_state, app_state=state)
        if isinstance(made, LatheProtocol):
            made.slot = slot
        return made

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
