"""The HTTP connection: inference answered without ASGI, everything else handed on to the application.

The connection is a subclass of uvicorn's httptools protocol (uvicorn is pinned for this). It has an inbox, which turns
bytes into requests (`lathe.server.api.connection.inbox`), and an outbox, which answers them in order
(`lathe.server.api.connection.outbox`). The connection hands events of the transport to them, and decides when it
closes.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn._types import HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from lathe.server.access.addresses import client_of
from lathe.server.api.connection import connection_reset
from lathe.server.api.connection.asgi_cycle import AsgiCycle, ResponseTransport, add_request_line
from lathe.server.api.connection.connection_slots import ConnectionSlot
from lathe.server.api.connection.hub import Hub
from lathe.server.api.connection.inbox import DISCARDING, IDLE, Inbox
from lathe.server.api.connection.outbox import Outbox
from lathe.server.api.connection.request_head import RequestHead
from lathe.server.api.connection.template_matcher import TemplateMatcher
from lathe.server.errors import BadRequest

HALF_CLOSE_GRACE = 0.05  # seconds in which work may begin for a client that has closed its sending side
STALLED = 1.0  # seconds without a byte after which a body under way makes room for others


class LatheProtocol(HttpToolsProtocol):
    """One HTTP connection: its `inbox` receives requests, its `outbox` answers them in order."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = None  # type: ignore[assignment]  # the inbox has a parser of its own
        self.hub: Hub = app_state["hub"]
        self.slot: ConnectionSlot  # the listener that accepts the connection sets it
        self.last_seen = self.hub.now  # when bytes arrived last
        self.templates = TemplateMatcher()
        self.inbox: Inbox  # from `connection_made` on
        self.outbox: Outbox

    # events of the transport and of the server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make the inbox and the outbox, and register the connection for the sweeps of the hub."""
        super().connection_made(transport)
        hub, flow, caller = self.hub, self.flow, client_of(self.client[0]) if self.client else ""
        self.outbox = Outbox(
            transport,
            flow,
            hub,
            self.server_state,
            caller,
            start_application=self._start_application,
            on_last_answer=self._on_last_answer,
        )
        self.transport = self.outbox.transport
        self.inbox = Inbox(hub, self.outbox, self.templates, flow, caller, self, self.slot, self._make_cycle)
        self.last_seen = hub.now
        hub.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the unanswered requests, and drop the message that has been received in part."""
        self.hub.connections.discard(self)
        self.inbox.on_connection_lost()
        self.outbox.on_connection_lost()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # it refers to this connection, and to the last request

    def data_received(self, data: bytes) -> None:
        """Start the request that a template matches, or hand the bytes to the inbox.

        Templates are compared only between two messages, and not while the server refuses requests under overload. Most
        requests of a busy connection match, so comparing with the binary template makes no call of Python code.
        """
        hub, inbox = self.hub, self.inbox
        if inbox.phase is IDLE and not hub.infer.plane.refusing_ticks:
            templates = self.templates
            template = templates.request_template
            if template is not None and len(data) == template.size and data.startswith(template.prefix):
                self.last_seen = hub.now
                self.outbox.repeat(template, data, data)
                return
            json_template = templates.json_template
            if json_template is not None:
                elements = json_template.read(data)
                if elements is not None:
                    self.last_seen = hub.now
                    self.outbox.repeat(json_template, elements, data)
                    return
        if not inbox.is_deaf:
            self.last_seen = hub.now
        inbox.receive(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Called when the client sends no more; returns False, which closes the connection, or True to keep it open.

        The connection closes if no request is unanswered, or if a message has been received only in part. Otherwise
        the client may still read, and the connection closes after the last answer. It closes earlier if no inference
        call runs at one of the checks, every `HALF_CLOSE_GRACE` seconds.
        """
        if not self.outbox.turns or self.inbox.phase is not IDLE:
            return False
        self.inbox.on_eof()
        self.outbox.close_after_last()
        self.loop.call_later(HALF_CLOSE_GRACE, self._close_unless_running)
        return True

    def pause_writing(self) -> None:
        """Called by the transport when its write buffer is full."""
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        """Called by the transport when its write buffer has drained."""
        self.outbox.resume_writing()

    def shutdown(self) -> None:
        """Called when the server stops: accepted requests are answered, then the connection closes."""
        self.inbox.stop(self.loop.time())
        self.outbox.stop()
        if self._is_idle():
            self.transport.close()

    def sweep(self, now: float) -> None:
        """Act on deadlines at loop time `now`.

        Resets the connection if answers are not read in time. Answers a late message with an error, or aborts the
        connection if the message has not begun or is answered already. Closes a connection that is idle for too long.
        """
        is_late = self.inbox.is_late(now)
        if self.outbox.is_unread(now):
            connection_reset.reset(self.transport)
        elif is_late:
            if not self.inbox.time_out():
                self.transport.abort()
        elif self._is_idle() and now - self.last_seen > self.hub.settings.keep_alive:
            connection_reset.close_or_reset(self.transport)

    def _close_unless_running(self) -> None:
        if self.transport.is_closing():
            return
        if self.outbox.has_running_call:
            self.loop.call_later(HALF_CLOSE_GRACE, self._close_unless_running)
        else:
            self.transport.close()

    def _is_idle(self) -> bool:
        return not (self.outbox.turns or self.inbox.is_receiving)

    # making room for others

    @property
    def is_spare(self) -> bool:
        """Whether the connection may be closed to make room for another one.

        That is if its client has shown no valid key, and no answer is due, except to a request whose body stalls.
        """
        if self.outbox.turns and not self._is_stalled():
            return False
        return not self.outbox.has_valid_key

    def _is_stalled(self) -> bool:
        """Whether the only unanswered request waits for its body, of which nothing has come for `STALLED` seconds.

        False for uploaded files, and for ASGI requests with a valid key.
        """
        turns = self.outbox.turns
        if len(turns) > 1 or not self.inbox.is_waiting_for(turns[0]):
            return False
        if isinstance(turns[0], AsgiCycle) and turns[0].has_valid_key:
            return False
        silence: float = self.loop.time() - self.last_seen
        return silence > STALLED

    # the application

    def _make_cycle(self, head: RequestHead) -> AsgiCycle:
        """Prepare a request for the application; BadRequest if its target is no path."""
        scope = self._make_scope(head)
        cycle = self.cycle = AsgiCycle(
            scope,
            ResponseTransport(self.transport, self._close_after_answer),
            self.flow,
            self.server_state.default_headers,
            expects_continue=head.expects_continue,
            keep_alive=head.keep_alive and self.inbox.has_slot,
            on_response=self.on_response_complete,
            on_upload=self._on_upload,
        )
        return cycle

    def _make_scope(self, head: RequestHead) -> HTTPScope:
        scope = cast(
            HTTPScope,
            {
                "type": "http",
                "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
                "server": self.server,
                "client": self.client,
                "scheme": self.scheme,
                "root_path": self.root_path,
                "headers": head.headers,
                "state": self.app_state.copy(),
            },
        )
        try:
            add_request_line(scope, head.method.decode("ascii"), head.version, head.target)
        except httptools.HttpParserError:
            raise BadRequest("request line: expected a path, got something else") from None
        return scope

    def _start_application(self, cycle: AsgiCycle) -> None:
        self._start_asgi_task(cycle, self.app)

    def _on_upload(self, cycle: AsgiCycle) -> None:
        self.inbox.on_upload(cycle, self.loop.time())

    def on_response_complete(self) -> None:
        """Called when the application has written its answer: starts the next turn."""
        cycle = self.outbox.end_cycle()
        if cycle is not None:
            self.inbox.on_answered(cycle, self.loop.time())
        self.outbox.advance()

    # closing

    def _on_last_answer(self) -> None:
        """Close after the last answer, of an inference call; the rest of a refused message is discarded before."""
        if self.inbox.phase is DISCARDING:
            self._linger()
        else:
            self.transport.close()

    def _close_after_answer(self) -> None:
        """Close after the last answer, of the application; the rest of a message in progress is discarded before."""
        if not self.inbox.is_receiving:
            self.transport.close()
            return
        self.inbox.discard()
        self.outbox.keep_only_first()
        self._linger()

    def _linger(self) -> None:
        """End the sending side (except over TLS), and discard further input before closing (lingering close).

        Closing at once would reset the connection while the client still sends, and the client could lose the answer.
        """
        self.inbox.linger(self.loop.time())
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
