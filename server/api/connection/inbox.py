"""Receiving on one connection: bytes become requests, which go to the outbox as turns.

A head that the parser has read before is recognised by its bytes, and its request never enters the parser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto

from uvicorn.protocols.http.flow_control import FlowControl

from lathe.server.api.codec.call_head import CallHead, call_head, is_infer_path
from lathe.server.api.connection.asgi_cycle import AsgiCycle
from lathe.server.api.connection.body_buffer import BodyBuffer
from lathe.server.api.connection.connection_slots import Connection, ConnectionSlot
from lathe.server.api.connection.hub import Hub
from lathe.server.api.connection.message_parser import MessageParser
from lathe.server.api.connection.outbox import Outbox, Turn
from lathe.server.api.connection.receive_deadline import ReceiveDeadline
from lathe.server.api.connection.request_head import RequestHead
from lathe.server.api.connection.template_matcher import TemplateMatcher
from lathe.server.api.inference.infer import InferCall
from lathe.server.api.middleware.body_limits import MAX_DOCUMENT
from lathe.server.errors import RequestTimeout, ServerError, TooLarge

HEALTH = b"/v2/health/"  # the paths that are served on a connection in the reserve of connection slots


# The transitions of `Phase`:
#   IDLE -> HEAD -> BODY -> IDLE                a message that the parser reads
#   HEAD -> HEAD                                a head that offers another protocol is read again without that offer
#   IDLE -> COLLECTING -> IDLE                  a message whose head is cached; one that arrives whole stays IDLE
#   HEAD, BODY, COLLECTING -> DISCARDING        the message is refused, or answered before its end with `close`
#   every phase -> CLOSED                       the client sends no more, or the connection is lost
class Phase(Enum):
    """The state of a connection's receiving side: the part of a message that is due next."""

    IDLE = auto()  # the first byte of a message is due
    HEAD = auto()
    BODY = auto()
    COLLECTING = auto()  # a body, without the parser
    DISCARDING = auto()  # all further bytes are dropped
    CLOSED = auto()


# The members as names of the module: in Python 3.11 a look-up in the class takes ten times as long.
IDLE, HEAD, BODY, COLLECTING, DISCARDING, CLOSED = Phase


class Inbox:
    """The message that a connection receives, with its limits and deadlines. It is the sink of its parser."""

    __slots__ = (
        "_body",
        "_caller",
        "_connection",
        "_deadline",
        "_flow",
        "_hub",
        "_make_cycle",
        "_max_body",
        "_missing",
        "_outbox",
        "_parser",
        "_received",
        "_slot",
        "has_slot",
        "phase",
        "request",
        "templates",
    )

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        templates: TemplateMatcher,
        flow: FlowControl,
        caller: str,
        connection: Connection,
        slot: ConnectionSlot,
        make_cycle: Callable[[RequestHead], AsgiCycle],
    ) -> None:
        """`caller`: the client's address. `slot`: the connection slot that was taken for `connection`.

        `make_cycle` prepares a request for ASGI, or raises ServerError.
        """
        self._hub = hub
        self._outbox = outbox
        self.templates = templates
        self._flow = flow
        self._caller = caller
        self._connection = connection
        self._slot = slot
        self._make_cycle = make_cycle
        self.has_slot = False  # whether the connection may ask for more than health checks
        self.phase = IDLE
        self.request: Turn | None = None  # whose body is received
        self._parser = MessageParser(self, hub.settings.max_header)
        self._deadline = ReceiveDeadline(hub.settings)
        self._deadline.start_head(hub.now)
        self._body = BodyBuffer(hub.ledger.claim(""))
        self._missing = 0  # bytes of the collected body that are still to come
        self._received = 0  # bytes of the body that have arrived
        self._max_body: float = 0

    @property
    def is_receiving(self) -> bool:
        """Whether a message has been received in part, or its rest is discarded."""
        return self.phase is not IDLE and self.phase is not CLOSED

    @property
    def is_deaf(self) -> bool:
        """Whether all further bytes are discarded."""
        return self.phase is DISCARDING or self.phase is CLOSED

    def is_waiting_for(self, turn: Turn) -> bool:
        """Whether the rest of this request's body is still due, and the body is no uploaded file."""
        return turn is self.request and not self._deadline.is_upload

    # bytes come in

    def receive(self, data: bytes) -> None:
        """Take bytes that match no request template.

        They are the rest of a body, requests whose heads are cached, or input of the parser; dropped if `is_deaf`. A
        request that is refused is answered with its error (`reject`).
        """
        if self.is_deaf:
            self._deadline.extend(self._hub.now)
            return
        if self.phase is COLLECTING:
            data = self._collect(data)
        if data and self.phase is IDLE:
            data = self._take_known(data)
        if data:
            self._deadline.extend(self._hub.now)
            try:
                self._parser.feed(data)
            except ServerError as error:
                self.reject(error)
        self._outbox.limit_turns()

    def _take_known(self, data: bytes) -> bytes:
        """Start or refuse the requests at the beginning of `data` whose heads are in the cache; return the rest."""
        heads = self._hub.heads
        while data:
            start = data.find(b"\r\n\r\n") + 4
            head = heads.get(data[:start])
            if head is None or not (self.has_slot or self._take_slot()):
                return data
            end = start + head.content_length
            if self._hub.infer.plane.refusing_ticks and self._turn_away(head, data, start):
                self._collect_rest(None, end - len(data))
            elif end > len(data):
                return self._collect_known(head, data[start:])
            else:
                call = self._outbox.open(head)
                self._deadline.clear()
                call.start(data[start:end])
                self.templates.observe(call, data, start, end)
            data = data[end:]
        return data

    def _turn_away(self, head: CallHead, data: bytes, start: int) -> bool:
        """Refuse a request under overload, by its head and the JSON in `data[start:]`; return whether it was refused.

        False if other requests of the connection are unanswered, if the server stops, or if the request must be read.
        """
        outbox = self._outbox
        if outbox.turns or outbox.is_stopping:
            return False
        reply = self._hub.infer.turn_away(head, data, start, self._caller)
        if reply is None:
            return False
        outbox.write_at_once(reply)
        return True

    def _collect_known(self, head: CallHead, data: bytes) -> bytes:
        """Open a request whose head is cached; `data` begins with its body so far. Return the bytes after the body."""
        call = self._outbox.open(head)
        self._collect_rest(call, head.content_length)
        try:
            self._body.begin(self._hub.infer.claim(head, self._caller))
        except ServerError as error:
            self.reject(error)
            return b""
        return self._collect(data)

    def _collect_rest(self, call: InferCall | None, missing: int) -> None:
        """Expect `missing` further bytes of a body; they are discarded if `call` is None: the request is refused."""
        if missing <= 0:
            self._deadline.clear()
            return
        self.phase = COLLECTING
        self.request = call
        self._missing, self._received = missing, 0
        self._deadline.start_body(self._hub.now)

    def _collect(self, data: bytes) -> bytes:
        part = data[: self._missing]
        try:
            if self.request is not None:
                self._body.add(part)
        except ServerError as error:
            self.reject(error)
            return b""
        self._received += len(part)
        self._missing -= len(part)
        if self._missing == 0:
            self.on_message_end()
        return data[len(part) :]

    # messages that the parser has read

    def on_message_begin(self) -> None:
        """Called at the first byte of a message."""
        self.phase = HEAD
        self._deadline.start_head(self._hub.now)

    def on_head(self, head: RequestHead) -> None:
        """Called with a complete head: check it, and open its turn. ServerError if it is refused."""
        self.phase = BODY
        self._received = 0
        head.check(self._hub.hosts)
        if not (self.has_slot or self._take_slot() or head.target.startswith(HEALTH)):
            raise self._slot.refusal()
        # 100 Continue must not overtake an answer
        if head.is_direct and not (head.expects_continue and self._outbox.turns):
            self._begin_call(head)
        else:
            self._begin_cycle(head)

    def on_body(self, part: bytes) -> None:
        """Called with a part of the body; TooLarge beyond the limit of its size, Overloaded as `BodyBuffer.add`."""
        self._received += len(part)
        if self._received > self._max_body:
            raise TooLarge(f"body: expected at most {self._max_body} bytes, got more")
        self._deadline.take(len(part), self._hub.now)
        if isinstance(self.request, AsgiCycle):
            self.request.add_body(part)
        else:
            self._body.add(part)

    def on_message_end(self) -> None:
        """Called at the end of a message, whether the parser has read it or not."""
        request, self.request = self.request, None
        self.phase = IDLE
        self._deadline.clear()
        if isinstance(request, InferCall):
            request.start(self._body.take())
        elif request is not None:
            request.end_body()

    def _begin_call(self, head: RequestHead) -> None:
        hub, outbox = self._hub, self._outbox
        parsed = call_head(head.target, head.headers)
        self._body.begin(hub.infer.claim(parsed, self._caller))
        self._max_body = hub.settings.max_body
        if parsed.content_length > self._max_body:
            raise TooLarge(f"body: expected at most {self._max_body} bytes, got {parsed.content_length}")
        self._deadline.start_body(hub.now)
        self.request = call = outbox.open(parsed)
        if not head.keep_alive:
            outbox.close_after(call)
        elif head.expects_continue:
            outbox.write_continue()
        elif parsed.content_length >= 0 and len(head.raw) > 4 and not (parsed.traceparent or parsed.request_id):
            hub.cache_head(head.raw, parsed)  # others never come twice

    def _begin_cycle(self, head: RequestHead) -> None:
        cycle, settings = self._make_cycle(head), self._hub.settings
        self._deadline.start_body(self._hub.now)
        path = cycle.scope["raw_path"]
        self._max_body = settings.max_body if is_infer_path(path) else min(MAX_DOCUMENT, settings.max_body)
        self.request = cycle
        self._outbox.open_cycle(cycle)

    def _take_slot(self) -> bool:
        """Note that the connection has sent a request; return whether it may ask for more than health checks."""
        self.has_slot = self._slot.on_request(self._connection)
        return self.has_slot

    # events of the application, the server and the transport

    def on_upload(self, cycle: AsgiCycle, now: float) -> None:
        """Lift the bound of a body's size, and give it the deadline of a file: the application receives an upload.

        The application bounds the size itself. No effect if another message is received now, or the answer has begun.
        """
        if cycle is self.request and not cycle.response_started:
            self._max_body = math.inf
            self._deadline.start_upload(now)

    def on_answered(self, cycle: AsgiCycle, now: float) -> None:
        """Called when a request is answered: if its body is still being received, the rest must come soon."""
        if cycle is self.request and not self.is_deaf:
            self.linger(now)

    def linger(self, now: float) -> None:
        """Start the deadline for the rest of a message that is answered before its end; its size has no bound then."""
        self._max_body = math.inf
        self._deadline.start_linger(now)

    def reject(self, error: ServerError) -> None:
        """Answer the message with an error, discard all further bytes, and close the connection after that answer.

        If the application has already begun an answer, the connection closes at once.
        """
        request, self.request = self.request, None
        path = b"" if self.phase is COLLECTING else self._parser.target
        self.phase = DISCARDING  # the rest of the message may still be coming
        outbox = self._outbox
        if isinstance(request, AsgiCycle) and not outbox.withdraw(request):
            outbox.transport.close()
            return
        self._body.take()
        self._deadline.clear()  # until this answer is written, which waits for those before it
        call = request if isinstance(request, InferCall) else outbox.open(CallHead(model=""))
        outbox.close_after(call)
        call.refuse(error, path)

    def discard(self) -> None:
        """Discard all further bytes: the connection closes after the answer that is written."""
        self.phase = DISCARDING

    def stop(self, now: float) -> None:
        """Called when the server stops: a message that is received in part must be complete within `STOP_GRACE`."""
        if self.is_receiving:
            self._deadline.start_stop(now)

    def on_eof(self) -> None:
        """Called when the client sends no more: further bytes would be discarded."""
        self.phase = CLOSED

    def on_connection_lost(self) -> None:
        """Drop the message, and the references to the connection.

        The connection refers to the inbox: without this cycle it is freed at once, and not by the garbage collector.
        """
        self.phase = CLOSED
        self._body.take()
        self._parser.close()
        del self._connection, self._make_cycle

    # deadlines

    def is_late(self, now: float) -> bool:
        """Whether the message has missed its deadline, or comes too slowly."""
        reading = not self._flow.read_paused
        if self._deadline.has_passed(now, reading=reading):
            return True
        is_body = self.phase is BODY or (self.phase is COLLECTING and self.request is not None)
        return is_body and reading and self._deadline.is_too_slow(self._received, now)

    def time_out(self) -> bool:
        """Answer a late message with RequestTimeout; False if no message has begun, or it is answered already."""
        if self.phase is IDLE or self.is_deaf or (self.phase is COLLECTING and self.request is None):
            return False
        part = "headers" if self.phase is HEAD else "body"
        self.reject(RequestTimeout(f"the request's {part} did not arrive in time"))
        return True
