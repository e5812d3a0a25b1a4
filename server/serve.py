"""One server process: it listens, and stops gracefully: accepted requests are answered first."""

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

from lathe.server.api.connection.connection_slots import ConnectionSlot
from lathe.server.api.connection.hub import Hub
from lathe.server.api.connection.protocol import LatheProtocol
from lathe.server.listening import Listener, listen
from lathe.server.settings import Settings

MALLOC_ARENAS = 2  # malloc arenas of the C library: one for the event loop, one that all other threads share
KEPT_BLOCK = (
    80 << 20
)  # bytes; freed blocks up to this size are reused: gRPC's copy of a 64 MiB message grows by an eighth
TOUCHED_SHARE = 32  # the part of the machine's memory that blocks for gRPC messages may take at the start
SWITCH_INTERVAL = (
    0.001  # seconds (sys.setswitchinterval): a worker with a finished batch waits at most so long for the event loop
)

log = logging.getLogger("lathe.server")


class LatheServer(uvicorn.Server):
    """uvicorn's server with a graceful stop: not ready from the first signal on, exit status 0 after the stop."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen on the configured address, or on `sockets` that listen already.

        Raises SystemExit if the application does not start or the address cannot be used. Also sets the interpreter's
        switch interval, and exempts all present objects from garbage collection.
        """
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
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.collect()
        gc.freeze()  # these objects live as long as the process; scanning them again would only delay requests

    def _protocol(self, slot: ConnectionSlot) -> asyncio.Protocol:
        state = self.lifespan.state
        kind = cast(type[HttpToolsProtocol], self.config.http_protocol_class)
        protocol = kind(config=self.config, server_state=self.server_state, app_state=state)
        if isinstance(protocol, LatheProtocol):
            protocol.slot = slot
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.plane.draining = True  # a stop without a signal has not set it yet
        endpoint = self._app.state.grpc
        if endpoint:  # HTTP and gRPC drain at the same time
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
        """A context manager that handles SIGINT and SIGTERM; unlike uvicorn's, it does not raise them again at its end.

        On another thread than the main one it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def block_of_messages(settings: Settings, memory: int) -> int:
    """The bytes of each of two blocks for gRPC messages that are in memory from the start; 0 on a small machine.

    gRPC copies a message twice on the event loop, and other clients wait meanwhile. `memory`: the machine's, in bytes.
    """
    block = min(settings.max_body + settings.max_body // 8, KEPT_BLOCK)
    return block if 2 * block * TOUCHED_SHARE <= memory else 0


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
        access_log=False,  # Lathe has its own (telemetry/access_log.py)
        log_config=None,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca else ssl.CERT_NONE,
        backlog=4096,
        timeout_graceful_shutdown=settings.drain_timeout,  # type: ignore[arg-type]  # uvicorn waits for parts of seconds
    )
    return LatheServer(config, app)
