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
from lathe.server.api.connection.repeated_requests import Repeats
from lathe.server.api.connection.request_template import LONGEST, Lane
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

REFUSALS = 256  # ready answers to those who are refused
DEFLATED = 4  # bytes that are read while one is compressed
NOTHING: list[Payload] = []  # never added to


class InferCall:
    """The state of one call. `deliver(call)` is called once, on the event loop, when `reply` is there."""

    __slots__ = (
        "address",
        "beside",
        "codec",
        "deliver",
        "entry",
        "head",
        "payloads",
        "reply",
        "request",
        "round",
        "servable",
        "service",
        "wire",
    )

    servable: Servable
    codec: Codec
    wire: ParsedRequest
    request: bytes  # all of it, if it came by a lane

    def __init__(self, service: InferService, head: CallHead, deliver: Deliver, address: str) -> None:
        self.service = service
        self.head = head
        self.deliver = deliver
        self.address = address
        self.reply: Reply | None = None
        self.payloads: list[Payload] = NOTHING  # what follows the reply's text
        self.entry: Entry | None = None
        self.round: Repeats | None = None  # in which it waits, having no entry yet
        self.beside: asyncio.Task[None] | None = None  # which reads its body, or writes its answer, on the threads

    def start(self, body: bytes | bytearray) -> None:
        """Read the body and queue the work; whatever is wrong with it becomes the reply."""
        try:
            self._submit(body)
        except Exception as error:
            self.refuse(error)

    def repeat(self, lane: Lane, data: bytes) -> None:
        """Queue the work of a request that is as the lane says, `data` being what that reads."""
        try:
            head, servable, plane = self.head, lane.servable, self.service.plane
            client = plane.authority.check(head.authorization, Scope.INFER, head.model) or self.address
            if plane.registry.settled(head.model, head.version) is not servable:
                lane.size = 0  # found out about what has changed
                self._submit(self.request[self.request.find(b"\r\n\r\n") + 4 :])
                return
            self.servable, self.codec, self.wire = servable, lane.codec, lane.wire
            self._queue(lane.codec.tensors(lane.wire, data, lane.start), client, text=lane.wire.text)
        except Exception as error:
            self.refuse(error)

    def lane(self, prefix: bytes, size: int) -> Lane | None:
        """Return what helps with further requests that begin with these bytes, this one's head and JSON; None where
        nothing does."""
        head = self.head
        if self.entry is None or head.json_bytes is None or head.encoding or len(prefix) > LONGEST:
            return None
        if self.wire.inlined or self.wire.read_cost > INLINE_BYTES:
            return None
        lane = self.service.lanes.get(prefix)
        if lane is None or not lane.size or lane.servable is not self.servable:
            lane = self.service.lanes[prefix] = Lane(prefix, size, head, self.servable, self.codec, self.wire)
            if lane.is_plain:
                lane.round = self.service.round(self.servable)
        return lane

    def json_template(self, request: bytes, start: int) -> JsonTemplate | None:
        """Return what helps with further requests that differ from this one, whose body begins at `start`, in the
        numbers of its list alone; None where nothing does."""
        head, settings, size = self.head, self.service.settings, len(request) - start
        if self.entry is None or head.json_bytes is not None or head.encoding or size > INLINE_BYTES:
            return None
        binary = self.wire.sent_as_binary()
        around = text_around(request, start) if binary is not None else None
        if binary is None or around is None or around.size > min(LONGEST, settings.max_header):
            return None
        template = self.service.json_templates.get(around)
        if template is None or not template.size or template.servable is not self.servable:
            reader = list_reader(binary.slots[0].datatype, binary.slots[0].shape)
            if reader is None:
                return None
            most = min(INLINE_BYTES, settings.max_body, settings.max_json)
            template = JsonTemplate(around, most, head, self.servable, self.codec, binary, reader)
            self.service.json_templates[around] = template
            if template.is_plain:
                template.round = self.service.round(self.servable)
        return template

    def refuse(self, error: Exception, path: bytes = b"") -> None:
        """Answer with an error, in the words of the path it was meant for."""
        self.service.failed(self, error, path)
        self.reply, self.payloads, self.entry = error_reply(error, path), NOTHING, None
        self.deliver(self)

    def cancel(self) -> None:
        """The caller left."""
        if self.round is not None:
            self.round.leave(self)
        elif self.beside is not None:
            self.beside.cancel()
        elif self.entry is not None:
            self.servable.cancel(self.entry)

    @property
    def is_waiting(self) -> bool:
        """Whether no work has begun, so that nothing is lost by dropping it."""
        return self.entry.is_waiting if self.entry is not None else self.reply is not None or self.round is not None

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
        """Go on once the body was read beside the event loop."""
        self.beside = asyncio.ensure_future(self._go_on(reading, client))

    async def _go_on(self, reading: Coroutine[Any, Any, ReadBody], client: str) -> None:
        try:
            self.wire, tensors, paid, text = await reading
            self.beside = None
            self._queue(tensors, client, paid, text)
        except Exception as error:
            self.beside = None
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
            self.beside = asyncio.ensure_future(self._write(outcome))
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
        """Answer once the threads have written what is too large for the event loop."""
        client = self.entry.client if self.entry is not None else self.address
        try:
            self.reply, self.payloads = await self.service.reading.readers.run_steps(client, self._writing(outputs))
        except Exception as error:
            self._fail(error)
        self.beside = None
        self.deliver(self)

    def _fail(self, error: Exception) -> None:
        self.service.failed(self, error)
        self.reply, self.payloads = error_reply(error), NOTHING

    def _cost(self, outputs: Tensors) -> int:
        cost = self.codec.cost(self.wire, outputs)
        if self.head.accepts and cost <= INLINE_BYTES:
            size = self.codec.size(self.wire, outputs)
            if self._is_compressed(size):
                cost += size * DEFLATED
        return cost

    def _writing(self, outputs: Tensors) -> Steps[tuple[Reply, list[Payload]]]:
        """Return the reply, and the payloads that follow its text."""
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
        """Whether the caller asked for just that, or an answer of so many bytes is large enough to gain."""
        head = self.head
        return bool(head.accepts) and (head.is_only_coding or size >= self.service.settings.compress_min)


def codec_of(servable: Servable, regions: Regions) -> Codec:
    """Return what reads and writes this version's wire format."""
    if servable.wire is None:
        servable.wire = Codec(servable.ref, servable.signature, regions)
    return servable.wire


def deadline_of(head: ParsedRequest) -> float | None:
    """Return when a request arriving now wants to be answered, in monotonic seconds."""
    return None if head.timeout is None else monotonic() + head.timeout


Deliver: TypeAlias = Callable[[InferCall], None]


class InferService:
    """What every call needs: the data plane and the limits."""

    def __init__(self, plane: DataPlane, settings: Settings, reading: BodyReader, access: AccessLog) -> None:
        self.plane = plane
        self.settings = settings
        self.lanes: WeakValueDictionary[bytes, Lane] = WeakValueDictionary()  # that connections use, by their beginning
        self.json_templates: WeakValueDictionary[TextAround, JsonTemplate] = WeakValueDictionary()
        self.access = access
        self.reading = reading
        self._refusals: dict[tuple[str, str, int], Reply] = {}

    def round(self, servable: Servable) -> Repeats | None:
        """Return where repeated requests for a version come together; None for what has no batches of its own."""
        if servable.round is None and isinstance(servable.batcher, Batcher):
            servable.round = Repeats(self.plane, servable, servable.batcher)
        return servable.round

    def claim(self, head: CallHead, address: str) -> MemoryClaim:
        """Return what counts a body that is about to be received from this address; raises Unauthorized or Forbidden
        where that would be for nothing."""
        return self.reading.ledger.claim(
            self.plane.authority.check(head.authorization, Scope.INFER, head.model) or address
        )

    def knows(self, head: CallHead) -> bool:
        """Say whether a call came with a key that may run its model."""
        try:
            return bool(self.plane.authority.check(head.authorization, Scope.INFER, head.model))
        except ServerError:
            return False

    def turn_away(self, head: CallHead, data: bytes, start: int, address: str) -> Reply | None:
        """Refuse a request whose body begins at `data[start]`, by its JSON alone; None: it is to be read.

        Under overload most requests end here. So nothing is made of them but a look into what was known already, and
        refusals with equal words are one reply.
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
        error = servable.turn_away(wire.group, wire.held, wire.timeout, key or address)
        if error is None:
            return None
        if self.access.wants(ok=False):
            served = error_entry(head, error, servable=servable, id=wire.id)
            served.client = address
            self.access.write(served)
        return self._refusal(error)

    def failed(self, call: InferCall, error: Exception, path: bytes = b"") -> None:
        """A call is answered with an error."""
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
            if len(self._refusals) >= REFUSALS:
                self._refusals.clear()
            reply = self._refusals[key] = error_reply(error)
        return reply

    def call(self, head: CallHead, deliver: Deliver, address: str) -> InferCall:
        """Begin a call from this address; hand it the whole body with `InferCall.start`."""
        return InferCall(self, head, deliver, address)
