"""The HTTP connection: inference answered without ASGI, everything else handed on to the application.

A subclass of uvicorn's httptools protocol (uvicorn is pinned for this). Here is what is received; what becomes of it,
and in which order, is in `lathe.server.api.connection.pipelining`. A head that the parser has seen before is
recognised by its bytes and
its request never enters the parser.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from lathe.server.access.addresses import client_of
from lathe.server.api.codec.call_head import CallHead, call_head, is_infer_path
from lathe.server.api.codec.codec import ParsedRequest
from lathe.server.api.connection import connection_reset
from lathe.server.api.connection.asgi_cycle import AsgiCycle, ResponseTransport, add_request_line
from lathe.server.api.connection.connection_slots import ConnectionSlot
from lathe.server.api.connection.framing import check_framing, check_target, parser_error
from lathe.server.api.connection.hosts import check_host
from lathe.server.api.connection.json_template import JsonTemplate
from lathe.server.api.connection.pipelining import AnswerPipeline, AsgiTurn, disconnect, has_valid_key
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.api.connection.transfer_rates import UploadRate
from lathe.server.api.inference.infer import NOTHING, InferCall
from lathe.server.api.middleware.body_limits import MAX_DOCUMENT
from lathe.server.errors import BadRequest, HeaderTooLarge, RequestTimeout, ServerError, TooLarge

HALF_CLOSE_GRACE = 0.05  # seconds in which work may begin for a client that has closed its sending side
STOP_GRACE = 5.0  # seconds a half-received request gets once the server stops
ALLOWANCE = 20.0  # seconds before the lowest rate of a body counts, as Apache's mod_reqtimeout has it
STALLED = 1.0  # seconds without a byte after which a body under way makes room for others
FEW_CHUNKS, MEAN_CHUNK = 4096, 64  # beyond so many chunks they must have this many bytes on average
HEALTH = b"/v2/health/"  # what may be asked for when there is no room for anything else
_UPGRADING = (b"upgrade", b"connection", b"http2-settings")  # headers that offer another protocol


class LatheProtocol(AnswerPipeline):
    """One client's connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.last_seen = self.hub.now
        self.slot: ConnectionSlot  # whoever accepts the connection sets it
        self.has_slot = False  # for more than health
        self.request_template: RequestTemplate | None = None  # of the last request that came twice in a row
        self.json_template: JsonTemplate | None = None  # the same for a request with numbers in JSON
        self.previous_request: ParsedRequest | None = None
        # the message being received
        self.url = b""
        self.in_message = self.in_head = False
        self.receiving: InferCall | None = None
        self.body = bytearray()
        self.claim = self.hub.ledger.claim("")  # of the body
        self.missing = 0  # bytes of a body that is collected without the parser
        self.size = self.chunks = 0
        self.wire = 0  # bytes that came in since the message's head ended, its framing included
        self.raw_head: bytes = b""
        self.refusal: ServerError | None = None

    # the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.caller = client_of(self.client[0]) if self.client else ""
        hub = self.hub
        hub.connections.add(self)
        self.last_seen = hub.now
        self.deadline = hub.now + hub.settings.header_timeout

    def connection_lost(self, exc: Exception | None) -> None:
        self.hub.connections.discard(self)
        turns, self.turns = self.turns, deque()
        self.deaf = True
        self._take_body()
        self._drop(turns)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may still read, so work that begins soon is answered; the rest is dropped."""
        if not self.turns or self.is_receiving or self.deaf:
            return False
        self.deaf = True
        self._close_after(self.turns[-1])
        self.loop.call_later(HALF_CLOSE_GRACE, self._abandon)
        return True

    def _abandon(self) -> None:
        if self.transport.is_closing():
            return
        if any(isinstance(turn, InferCall) and not turn.is_waiting for turn in self.turns):
            self.loop.call_later(HALF_CLOSE_GRACE, self._abandon)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops: accepted requests are answered, then the connection closes."""
        self.stopping = True
        if self.is_receiving:
            self.gone_by = min(self.gone_by, self.loop.time() + STOP_GRACE)
            self.deadline = min(self.deadline, self.gone_by)
        if self.turns:
            self._close_after(self.turns[-1])
        elif self._is_idle():
            self.transport.close()

    def sweep(self, now: float) -> None:
        """Act on deadlines."""
        if self.pace is not None:
            self.deadline = min(self.gone_by, self.pace.look(now, reading=not self.flow.read_paused))
        if self.answer_rate is not None and now > self.answer_rate.look(self.transport.get_write_buffer_size(), now):
            connection_reset.reset(self.transport)
        elif now > self.deadline or self._is_too_slow(now):
            self._timed_out()
        elif self._is_idle() and now - self.last_seen > self.hub.settings.keep_alive:
            connection_reset.close_or_reset(self.transport)

    def _take_slot(self) -> bool:
        """Say whether this connection may ask for more than health, now that it has sent a request."""
        self.has_slot = self.slot.on_request(self)
        return self.has_slot

    @property
    def is_spare(self) -> bool:
        """Whether nothing is lost if it makes room for another: no answer is due but to a request that does not go on,
        and no key was shown."""
        if self.turns and not (self._waits_for_body() and self.loop.time() - self.last_seen > STALLED):
            return False
        return not (self.has_key or (self.head is not None and self.hub.infer.knows(self.head)))

    def _waits_for_body(self) -> bool:
        """Whether the one answer due waits for a body, which is no file."""
        turn = self.turns[0]
        if len(self.turns) > 1 or self.pace is not None:
            return False
        if not isinstance(turn, AsgiTurn):
            return turn is self.receiving
        return turn.cycle is self.receiving_cycle and not has_valid_key(turn.cycle)

    @property
    def is_receiving(self) -> bool:
        return bool(self.in_message or self.missing)

    def _is_idle(self) -> bool:
        return not (self.turns or self.is_receiving)

    def _is_too_slow(self, now: float) -> bool:
        """Whether a body that is no file comes at less than the lowest rate; files have a pace of their own."""
        if self.pace is not None or self.in_head or self.deaf or self.gone_by < math.inf or self.flow.read_paused:
            return False
        if not (self.in_message or (self.missing and self.receiving)):
            return False
        settings, received = self.hub.settings, max(self.size, len(self.body))
        began = self.deadline - settings.body_timeout
        return now > began + ALLOWANCE + received / settings.min_receive_rate

    def _timed_out(self) -> None:
        if self.deaf or not (self.in_message or (self.missing and self.receiving)):
            self.transport.abort()
            return
        part = "headers" if self.in_head else "body"
        self.reject(RequestTimeout(f"the request's {part} did not arrive in time"))

    # bytes come in

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            if self.gone_by < math.inf:  # else answers are still due, and the message has no deadline yet
                self._extend_linger_deadline()
            return
        hub = self.hub
        self.last_seen = hub.now
        template = self.request_template
        if (
            template is not None
            and len(data) == template.size
            and data.startswith(template.prefix)
            and not (self.missing or self.in_message or hub.infer.plane.refusing_ticks)
        ):
            self._repeat(template, data, data)
            return
        json_template = self.json_template
        if json_template is not None and not (self.missing or self.in_message or hub.infer.plane.refusing_ticks):
            elements = json_template.read(data)
            if elements is not None:
                self._repeat(json_template, elements, data)
                return
        if self.missing:
            data = self._collect(data)
        if data and not self.in_message:
            data = self._take_known(data)
        if data:
            if self.gone_by < math.inf:
                self._extend_linger_deadline()
            self._parse(data)
        if len(self.turns) >= self.hub.settings.max_pipeline:
            self.flow.pause_reading()

    def _take_known(self, data: bytes) -> bytes:
        """Start the requests at the beginning of `data` whose HTTP heads are in the cache; return the rest."""
        heads = self.hub.heads
        while data:
            end = data.find(b"\r\n\r\n") + 4
            head = heads.get(data[:end])
            if head is None or not (self.has_slot or self._take_slot()):
                return data
            after = end + head.content_length
            if self.hub.infer.plane.refusing_ticks and not self.turns and self._turn_away(head, data, end):
                self.missing = max(0, after - len(data))
                self.deadline = self.hub.now + self.hub.settings.body_timeout if self.missing else math.inf
                data = data[after:]
                continue
            call = self._open(head)
            if after > len(data):
                try:
                    self.claim = self.hub.infer.claim(head, self.caller)
                except ServerError as error:
                    self.url, self.receiving = b"", call
                    self.reject(error)
                    return b""
                self.deadline = self.hub.now + self.hub.settings.body_timeout
                self.url = b""
                self.receiving, self.missing = call, after - end
                return self._collect(data[end:])
            self.deadline = math.inf
            call.start(data[end:after])
            self._expect_again(call, data, end, after)
            data = data[after:]
        return data

    def _expect_again(self, call: InferCall, data: bytes, end: int, after: int) -> None:
        """Build templates after two equal requests in a row: a third one is likely. The HTTP head ends at `end`."""
        parsed = call.wire if call.entry is not None else None
        if parsed is not None and parsed is self.previous_request:
            self.request_template = call.request_template(data[: end + (call.head.json_bytes or 0)], after)
            self.json_template = call.json_template(data[:after], end)
        self.previous_request = parsed

    def _repeat(self, template: RequestTemplate, data: bytes, request: bytes) -> None:
        """Start a request that matches a template. `data` holds its tensors, at the offsets of the template."""
        call = InferCall(self.hub.infer, template.head, self._deliver, self.caller)
        call.request = request
        self.turns.append(call)
        if template.repeated_requests is not None:
            template.repeated_requests.join(call, template, data)
        else:
            call.repeat(template, data)
        if len(self.turns) >= self.hub.settings.max_pipeline:
            self.flow.pause_reading()

    def _turn_away(self, head: CallHead, data: bytes, end: int) -> bool:
        """Refuse a request by its head alone if it must be refused; return whether it was. Its body is not kept."""
        reply = None if self.stopping else self.hub.infer.turn_away(head, data, end, self.caller)
        if reply is None:
            return False
        self.server_state.total_requests += 1
        self._write(reply, NOTHING)
        return True

    def _collect(self, data: bytes) -> bytes:
        part = data[: self.missing]
        try:
            if self.receiving is not None:  # else it is refused already
                self._keep(part)
        except ServerError as error:
            self.reject(error)
            return b""
        self.missing -= len(part)
        if self.missing == 0:
            self._received()
        return data[len(part) :]

    def _keep(self, part: bytes) -> None:
        self.claim.add(len(part))
        self.body += part

    def _take_body(self) -> bytearray:
        body, self.body = self.body, bytearray()
        self.claim.release()
        return body

    def _parse(self, data: bytes) -> None:
        self.raw_head = b""
        if not self.in_message:
            self.raw_head = data[: data.find(b"\r\n\r\n") + 4]
            self.size = 0
        if self.in_head or not self.in_message:
            self.size += len(data)
        self.wire += len(data)
        try:
            self._feed(data)
            if self.in_head:
                self._limit_head(self.size)
            elif self.in_message:
                self._limit_framing()
        except httptools.HttpParserError as error:
            reason = str(error.args[0]) if error.args else ""
            self.reject(self.refusal or parser_error(reason, data, self.headers or (), in_head=self._is_at_head()))
        except ServerError as error:
            self.reject(error)

    def _feed(self, data: bytes) -> None:
        """Let the parser read all of it. It stops after a head that offers another protocol: the head is read again
        without that offer, and answered as if there had been none."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                if self.parser.get_method() == b"CONNECT":
                    raise BadRequest("request line: CONNECT is not supported") from None
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)  # the other one may take it that nothing follows
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: it is ignored
                self.in_message = False
                self.raw_head = b""
                self.parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        """Return the head that was just read, but for the protocol that it offers; what it says of the connection's
        end stays."""
        version = self.parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _UPGRADING]
        if self.parser.should_keep_alive() != (version == "1.1"):
            lines.append(b"connection: close" if version == "1.1" else b"connection: keep-alive")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _is_at_head(self) -> bool:
        return self.in_head or not self.in_message

    def _refuse(self, error: ServerError) -> None:
        self.refusal = error  # the parser wraps whatever its callbacks raise
        raise error

    def _limit_head(self, size: int) -> None:
        limit = self.hub.settings.max_header
        if size > limit:
            self._refuse(HeaderTooLarge(f"headers: expected at most {limit} bytes, got more"))

    def _limit_framing(self) -> None:
        """Bound what comes with a body and is none of it: the sizes of chunks, their extensions, trailers."""
        limit = self.hub.settings.max_header + self.chunks * MEAN_CHUNK
        if self.wire - self.size > limit:
            self._refuse(HeaderTooLarge(f"body: expected at most {limit} bytes of chunk sizes and trailers, got more"))

    # the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_message = self.in_head = True
        self.head_size = self.chunks = self.wire = 0
        self.deadline = self.hub.now + self.hub.settings.header_timeout

    def on_url(self, url: bytes) -> None:
        self.head_size += len(url)
        self._limit_head(self.head_size)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head_size += len(name) + len(value) + 4
        self._limit_head(self.head_size)
        if self.in_head:  # else a trailer, which is none of the headers (RFC 9110, section 6.5.1) and is dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser stops here; see _feed
        self.in_head = False
        self.size = 0
        self._check_head()
        if not (self.has_slot or self._take_slot() or self.url.startswith(HEALTH)):
            self._refuse(self.slot.refusal())
        if self._is_direct():
            self._begin_call()
        else:
            self._begin_asgi()

    def _check_head(self) -> None:
        version, headers = self.parser.get_http_version(), self.headers
        try:
            check_host(version, headers, self.hub.hosts)
            check_framing(version, headers)
            check_target(self.parser.get_method(), self.url, headers)
        except ServerError as error:
            self._refuse(error)

    def _is_direct(self) -> bool:
        return (
            self.parser.get_method() == b"POST"
            and is_infer_path(self.url)
            and self.parser.get_http_version() == "1.1"
            and not (self.expect_100_continue and self.turns)  # 100 Continue must not overtake an answer
            and not self._is_from_a_page()  # which the application may refuse, or answer with headers for it
        )

    def _is_from_a_page(self) -> bool:
        return any(name in (b"origin", b"sec-fetch-site") for name, _ in self.headers)

    def _begin_call(self) -> None:
        settings = self.hub.settings
        try:
            head = call_head(self.url, self.headers)
            self.claim = self.hub.infer.claim(head, self.caller)
            if head.content_length > settings.max_body:
                raise TooLarge(f"body: expected at most {settings.max_body} bytes, got {head.content_length}")
        except ServerError as error:
            self._refuse(error)
            raise
        self.deadline = self.hub.now + settings.body_timeout
        self.most = settings.max_body
        call = self.receiving = self._open(head)
        if not self.parser.should_keep_alive():
            self.final = call
        elif self.expect_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif head.content_length >= 0 and len(self.raw_head) > 4 and not (head.traceparent or head.request_id):
            self.hub.cache_head(self.raw_head, head)  # others never come twice

    def _begin_asgi(self) -> None:
        settings, parser, version = self.hub.settings, self.parser, self.parser.get_http_version()
        try:
            add_request_line(self.scope, parser.get_method().decode("ascii"), version, self.url)
        except httptools.HttpParserError:
            self._refuse(BadRequest("request line: expected a path, got something else"))
        self.deadline = self.hub.now + settings.body_timeout
        self.most = settings.max_body if is_infer_path(self.scope["raw_path"]) else min(MAX_DOCUMENT, settings.max_body)
        self.cycle = self.receiving_cycle = AsgiCycle(
            self.scope,
            ResponseTransport(self.transport, self._close_after_answer),
            self.flow,
            self.server_state.default_headers,
            expects_continue=self.expect_100_continue,
            keep_alive=parser.should_keep_alive() and self.has_slot,
            on_response=self.on_response_complete,
            on_upload=self._expect_file,
        )
        self._start_asgi_task(self.cycle, self.app)

    def _expect_file(self, cycle: RequestResponseCycle) -> None:
        """The application lets this request's body be a file; its size is bounded where it is received."""
        if cycle is self.receiving_cycle and not cycle.response_started:
            settings, now = self.hub.settings, self.loop.time()
            self.most = math.inf
            self.pace = UploadRate(
                now, settings.upload_timeout, settings.body_timeout, settings.min_receive_rate, now, now
            )

    def on_chunk_header(self) -> None:
        self.chunks += 1
        if self.chunks > FEW_CHUNKS and self.size < self.chunks * MEAN_CHUNK:
            self._refuse(
                BadRequest(f"body: expected chunks of {MEAN_CHUNK} bytes or more on average, got {self.chunks} smaller")
            )

    def on_body(self, body: bytes) -> None:
        self.size += len(body)
        if self.size > self.most:
            self._refuse(TooLarge(f"body: expected at most {self.most} bytes, got more"))
        if self.pace is not None:
            self.pace.take(len(body), self.hub.now)
        if self.receiving is None:
            super().on_body(body)
            return
        try:
            self._keep(body)
        except ServerError as error:
            self._refuse(error)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self.in_message = False
        self.size = 0
        self.raw_head = b""  # a further head in the same data does not start where it did
        self.deadline = self.gone_by = math.inf
        self.receiving_cycle = self.pace = None
        if self.receiving is None:
            super().on_message_complete()
        else:
            self._received()

    def _received(self) -> None:
        call, self.receiving = self.receiving, None
        body = self._take_body()
        self.deadline = math.inf
        if call is not None:
            call.start(body)

    def reject(self, error: ServerError) -> None:
        """Answer the message being received with an error, read no more of it, and close."""
        self.deaf = True
        if self.receiving_cycle is not None and not self._withdraw(self.receiving_cycle):
            self.transport.close()
            return
        call = self.receiving or self._open(CallHead(model=""))
        self.receiving = None
        self._take_body()
        self.in_message = True  # the rest of it may still be coming
        self.deadline = self.gone_by = math.inf  # until this answer is written, which waits for those before it
        self.pace = None
        self.final = call
        call.refuse(error, self.url)

    def _withdraw(self, cycle: RequestResponseCycle) -> bool:
        """Take a half-received request away from the application; False when it has begun to answer."""
        if cycle.response_started:
            return False
        self.turns.pop()
        disconnect(cycle)
        return True
