"""One inference call from its body to its reply; both transports (the HTTP protocol class and ASGI) drive this."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from lathe.server.access.scopes import Scope
from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.compression import deflate_steps
from lathe.server.api.codec.payloads import Payload
from lathe.server.api.codec.reply import Header, Reply, binary_headers, error_reply, render_block
from lathe.server.api.connection.json_template import JsonTemplate, TextAround, text_around
from lathe.server.api.connection.repeated_requests import RepeatedRequests
from lathe.server.api.connection.request_template import MAX_PREFIX_BYTES, RequestTemplate
from lathe.server.api.inference.body_reader import BodyReader, ReadBody
from lathe.server.api.inference.log_fields import error_entry
from lathe.server.api.inference.memory_ledger import MemoryClaim
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.backends.json_numbers import list_reader
from lathe.server.batching.batcher import Batcher
from lathe.server.batching.entry import DirectEntry, Entry, Outcome
from lathe.server.errors import ServerError
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.settings import Settings
from lathe.server.shared_memory import Regions
from lathe.server.steps import Steps, run_all
from lathe.server.telemetry.access_log import AccessLog
from lathe.server.types import Tensors

MAX_REFUSALS = 256  # encoded error answers that are kept for reuse
DEFLATE_COST = 4  # compressing one byte takes as long as reading four
NOTHING: list[Payload] = []  # shared by all calls, so nothing is ever appended to it


class InferCall:
    """The state of one inference call.

    `deliver(call)` is called once, on the event loop, when `reply` is set; not after `cancel`.
    """

    __slots__ = (
        "address",
        "background",
        "codec",
        "deliver",
        "entry",
        "head",
        "payloads",
        "repeated_requests",
        "reply",
        "request",
        "servable",
        "service",
        "wire",
    )

    servable: Servable
    codec: Codec
    wire: ParsedRequest
    request: bytes  # the whole request, set if it matched a template

    def __init__(self, service: InferService, head: CallHead, deliver: Deliver, address: str) -> None:
        self.service = service
        self.head = head
        self.deliver = deliver
        self.address = address
        self.reply: Reply | None = None
        self.payloads: list[Payload] = NOTHING  # the binary outputs, sent after the text of the reply
        self.entry: Entry | None = None
        self.repeated_requests: RepeatedRequests | None = None  # set while the call waits there for its batch
        self.background: asyncio.Task[None] | None = None  # reads the body, or writes the answer, on a thread

    def start(self, body: bytes | bytearray) -> None:
        """Read the whole body and queue the request for execution. An error becomes the reply.

        What takes long is read on threads, after this returns.
        """
        try:
            self._submit(body)
        except Exception as error:
            self.refuse(error)

    def repeat(self, template: RequestTemplate, data: bytes) -> None:
        """Queue a request that matches a template, without parsing it: its tensors are read from `data`.

        If another version answers for the model now, the template is invalidated and the request is parsed instead. An
        error becomes the reply.
        """
        try:
            head, servable, plane = self.head, template.servable, self.service.plane
            client = plane.authority.check(head.authorization, Scope.INFER, head.model) or self.address
            if plane.registry.settled(head.model, head.version) is not servable:
                template.size = 0  # made for a version that no longer serves this name
                self._submit(self.request[self.request.find(b"\r\n\r\n") + 4 :])
                return
            self.servable, self.codec, self.wire = servable, template.codec, template.wire
            self._queue(template.codec.tensors(template.wire, data, template.start), client, text=template.wire.text)
        except Exception as error:
            self.refuse(error)

    def request_template(self, prefix: bytes, size: int) -> RequestTemplate | None:
        """Return the template (cached parsed request) of requests that begin with `prefix`, None if they can have none.

        `prefix` is the HTTP head and the JSON of this request, and `size` the bytes of the whole request. The service
        refers to the template weakly: it lives as long as the caller keeps it.
        """
        head = self.head
        if self.entry is None or head.json_bytes is None or head.encoding or len(prefix) > MAX_PREFIX_BYTES:
            return None
        if self.wire.inlined or self.wire.read_cost > INLINE_BYTES:
            return None
        template = self.service.request_templates.get(prefix)
        if template is None or not template.size or template.servable is not self.servable:
            template = self.service.request_templates[prefix] = RequestTemplate(
                prefix, size, head, self.servable, self.codec, self.wire
            )
            if template.is_plain:
                template.repeated_requests = self.service.repeated_requests(self.servable)
        return template

    def json_template(self, request: bytes, start: int) -> JsonTemplate | None:
        """Return the template of requests that differ from this one only in the numbers in their JSON, otherwise None.

        The numbers are the only list of numbers in the JSON body, which begins at `request[start]`. None if the request
        cannot have a template. The service refers to the template weakly: it lives as long as the caller keeps it.
        """
        head, settings, size = self.head, self.service.settings, len(request) - start
        if self.entry is None or head.json_bytes is not None or head.encoding or size > INLINE_BYTES:
            return None
        binary = self.wire.sent_as_binary()
        around = text_around(request, start) if binary is not None else None
        if binary is None or around is None or around.size > min(MAX_PREFIX_BYTES, settings.max_header):
            return None
        template = self.service.json_templates.get(around)
        if template is None or not template.size or template.servable is not self.servable:
            reader = list_reader(binary.slots[0].datatype, binary.slots[0].shape)
            if reader is None:
                return None
            max_body = min(INLINE_BYTES, settings.max_body, settings.max_json)
            template = JsonTemplate(around, max_body, head, self.servable, self.codec, binary, reader)
            self.service.json_templates[around] = template
            if template.is_plain:
                template.repeated_requests = self.service.repeated_requests(self.servable)
        return template

    def refuse(self, error: Exception, path: bytes = b"") -> None:
        """Answer with an error, in the format that the API of this path uses."""
        self.service.failed(self, error, path)
        self.reply, self.payloads, self.entry = error_reply(error, path), NOTHING, None
        self.deliver(self)

    def cancel(self) -> None:
        """Drop the call: the caller has closed the connection."""
        if self.repeated_requests is not None:
            self.repeated_requests.leave(self)
        elif self.background is not None:
            self.background.cancel()
        elif self.entry is not None:
            self.servable.cancel(self.entry)

    @property
    def is_waiting(self) -> bool:
        """Whether dropping the call loses no work: it waits for a batch, or was answered without one."""
        if self.entry is not None:
            return self.entry.is_waiting
        return self.reply is not None or self.repeated_requests is not None

    def _submit(self, body: bytes | bytearray) -> None:
        head = self.head
        self.servable, client = self.service.plane.route(
            head.model, head.version, key=head.sticky_key, authorization=head.authorization, address=self.address
        )
        servable, reading = self.servable, self.service.reading
        codec = self.codec = codec_of(servable, self.service.plane.regions)
        if head.encoding or (len(body) > INLINE_BYTES if head.json_bytes is None else head.json_bytes > INLINE_BYTES):
            self._read(reading.read(servable, codec, body, head.encoding, head.json_bytes, client), client)
            return
        size = reading.json_size(len(body), head.json_bytes)
        wire, taken = codec.begin(body, size)
        if wire.read_cost > INLINE_BYTES:
            self._read(reading.read_tensors(servable, codec, wire, body, size, client), client)
            return
        self.wire = wire
        self._queue(codec.tensors(wire, body, size, taken), client, text=wire.max_text_bytes(size))

    def _read(self, reading: Coroutine[Any, Any, ReadBody], client: str) -> None:
        """Start a task that awaits `reading` (the body is read on threads), and then queues the request of `client`."""
        self.background = asyncio.ensure_future(self._read_then_queue(reading, client))

    async def _read_then_queue(self, reading: Coroutine[Any, Any, ReadBody], client: str) -> None:
        try:
            self.wire, tensors, paid, text = await reading
            self.background = None
            self._queue(tensors, client, paid, text)
        except Exception as error:
            self.background = None
            self.refuse(error)

    def _queue(self, tensors: Tensors, client: str, paid: int = 0, text: int = 0) -> None:
        wire = self.wire
        entry = self.entry = DirectEntry(tensors, wire.group, self._finish, deadline_of(wire), wire.priority, text)
        entry.client, entry.charged_rows = client, paid
        entry.id = wire.id or self.head.request_id
        self.service.plane.submit(self.servable, entry, self.head.traceparent)

    def _finish(self, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            self._fail(outcome)
            self.deliver(self)
        elif self._cost(outcome) > INLINE_BYTES:
            self.background = asyncio.ensure_future(self._write(outcome))
        else:
            self._answer(outcome)

    def _answer(self, outputs: Tensors) -> None:
        try:
            if self.head.accepts:
                self.reply, self.payloads = run_all(self._writing(outputs))
            else:
                self.reply, self.payloads = self.codec.answer(self.wire, outputs)
        except Exception as error:
            self._fail(error)
        self.deliver(self)

    async def _write(self, outputs: Tensors) -> None:
        """Encode a large answer on a thread, then deliver it; an error becomes the reply."""
        client = self.entry.client if self.entry is not None else self.address
        try:
            self.reply, self.payloads = await self.service.reading.readers.run_steps(client, self._writing(outputs))
        except Exception as error:
            self._fail(error)
        self.background = None
        self.deliver(self)

    def _fail(self, error: Exception) -> None:
        self.service.failed(self, error)
        self.reply, self.payloads = error_reply(error), NOTHING

    def _cost(self, outputs: Tensors) -> int:
        cost = self.codec.cost(self.wire, outputs)
        if self.head.accepts and cost <= INLINE_BYTES:
            size = self.codec.size(self.wire, outputs)
            if self._is_compressed(size):
                cost += size * DEFLATE_COST
        return cost

    def _writing(self, outputs: Tensors) -> Steps[tuple[Reply, list[Payload]]]:
        """Return the reply and the payloads that follow its text, none if it is compressed; computed in steps."""
        answer, payloads = yield from self.codec.encoding(self.wire, outputs)
        coding, parts = self.head.accepts, [answer.json, *payloads]
        if not coding or not self._is_compressed(sum(map(len, parts))):
            return answer.reply(payloads), payloads
        body = yield from deflate_steps(parts, coding)
        kind: tuple[Header, ...] = ((b"content-type", b"application/json"),)
        if payloads:
            kind = binary_headers(answer.json)
        headers = (*kind, (b"content-encoding", coding), (b"content-length", b"%d" % len(body)))
        return Reply(200, headers, body, render_block(headers, body)), NOTHING

    def _is_compressed(self, size: int) -> bool:
        """Whether an answer of `size` bytes is compressed.

        That is if the caller accepts a coding and, unless it lists only that one, the answer is large enough.
        """
        head = self.head
        return bool(head.accepts) and (head.is_only_coding or size >= self.service.settings.compress_min)


def codec_of(servable: Servable, regions: Regions) -> Codec:
    """Return the codec of the requests and answers of this version; it is created at the first use."""
    if servable.wire is None:
        servable.wire = Codec(servable.ref, servable.signature, regions)
    return servable.wire


def deadline_of(head: ParsedRequest) -> float | None:
    """Return the deadline of a request that arrives now, in seconds of the monotonic clock; None: it has none."""
    return None if head.timeout is None else monotonic() + head.timeout


Deliver: TypeAlias = Callable[[InferCall], None]


class InferService:
    """The parts that all calls share: data plane, limits, body reader, templates, access log."""

    def __init__(self, plane: DataPlane, settings: Settings, reading: BodyReader, access: AccessLog) -> None:
        self.plane = plane
        self.settings = settings
        # Templates live as long as a connection uses them.
        self.request_templates: WeakValueDictionary[bytes, RequestTemplate] = WeakValueDictionary()  # by prefix
        self.json_templates: WeakValueDictionary[TextAround, JsonTemplate] = WeakValueDictionary()
        self.access = access
        self.reading = reading
        self._refusals: dict[tuple[str, str, int], Reply] = {}

    def repeated_requests(self, servable: Servable) -> RepeatedRequests | None:
        """Return the object in which repeated requests of a version form batches; None if it has no `Batcher`."""
        if servable.repeated_requests is None and isinstance(servable.batcher, Batcher):
            servable.repeated_requests = RepeatedRequests(self.plane, servable, servable.batcher)
        return servable.repeated_requests

    def claim(self, head: CallHead, address: str) -> MemoryClaim:
        """Return the claim, of 0 bytes at first, that counts the bytes of a body while it arrives from this address.

        Raises Unauthorized or Forbidden if the caller may not run the model.
        """
        return self.reading.ledger.claim(
            self.plane.authority.check(head.authorization, Scope.INFER, head.model) or address
        )

    def knows(self, head: CallHead) -> bool:
        """Return whether the call carries a key that may run its model; False if the server needs no keys."""
        try:
            return bool(self.plane.authority.check(head.authorization, Scope.INFER, head.model))
        except ServerError:
            return False

    def turn_away(self, head: CallHead, data: bytes, start: int, address: str) -> Reply | None:
        """Return (and log) the refusal of a request whose body begins at `data[start]`; None: it must be read.

        Under overload most requests end here. So the decision uses only cached data (the parsed JSON of an earlier
        equal request), and equal refusals share one encoded reply.
        """
        size = head.json_bytes
        if size is None or head.encoding or start + size > len(data):
            return None
        try:
            found = self.plane.route_if_overloaded(head.model, head.version, head.authorization)
        except ServerError:
            return None
        if found is None:
            return None
        servable, key = found
        wire = codec_of(servable, self.plane.regions).known(data[start : start + size])
        if wire is None:
            return None
        error = servable.turn_away(wire.group, wire.element_bytes, wire.timeout, key or address, wire.priority)
        if error is None:
            return None
        if self.access.wants(ok=False):
            served = error_entry(head, error, servable=servable, id=wire.id)
            served.client = address
            self.access.write(served)
        return self._refusal(error)

    def failed(self, call: InferCall, error: Exception, path: bytes = b"") -> None:
        """Write the access log entry of a call that is answered with an error."""
        if not self.access.wants(ok=False):
            return
        entry, servable = call.entry, getattr(call, "servable", None)
        served = error_entry(call.head, error, path, servable, entry.id if entry is not None else "")
        served.client = entry.client if entry is not None else call.address
        served.trace_id = (entry.trace if entry is not None else "") or served.trace_id
        if entry is not None and entry.since:
            served.seconds = monotonic() - entry.since
        self.access.write(served)

    def _refusal(self, error: ServerError) -> Reply:
        key = (error.code, error.message, math.ceil(error.retry_after or 0))
        reply = self._refusals.get(key)
        if reply is None:
            if len(self._refusals) >= MAX_REFUSALS:
                self._refusals.clear()
            reply = self._refusals[key] = error_reply(error)
        return reply

    def call(self, head: CallHead, deliver: Deliver, address: str) -> InferCall:
        """Create the call of a client at this address; the transport then passes the body to `InferCall.start`."""
        return InferCall(self, head, deliver, address)
