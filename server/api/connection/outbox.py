"""HTTP pipelining: answers the requests of one connection in the order in which they arrived.

The requests of a connection are a deque of turns. Each turn is an `InferCall` or an ASGI cycle, and only the first may
write. So pipelined inference calls run at the same time and share batches, while their answers keep their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.utils import is_ssl
from uvicorn.server import ServerState

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.codec.payloads import Payload
from lathe.server.api.codec.reply import Reply, with_close
from lathe.server.api.connection.asgi_cycle import AsgiCycle
from lathe.server.api.connection.hub import Hub
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.api.connection.sliced_transport import SlicedTransport
from lathe.server.api.connection.transfer_rates import AnswerRate
from lathe.server.api.inference.infer import NOTHING, InferCall

BIG_PAYLOAD = 1 << 16  # bytes from which payloads are written without being joined to one buffer

Turn: TypeAlias = InferCall | AsgiCycle


class Outbox:
    """The answers of one connection: its turns, the transport that they are written to, and how fast that accepts them.

    Stops reading from a client that has at least `max_pipeline` unanswered requests, or does not read its answers.
    """

    __slots__ = (
        "_answer_rate",
        "_caller",
        "_final",
        "_flow",
        "_has_key",
        "_head",
        "_infer",
        "_max_pipeline",
        "_on_last_answer",
        "_server_state",
        "_settings",
        "_start_application",
        "is_stopping",
        "slices",
        "transport",
        "turns",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        hub: Hub,
        server_state: ServerState,
        caller: str,
        *,
        start_application: Callable[[AsgiCycle], None],
        on_last_answer: Callable[[], None],
    ) -> None:
        """`caller`: the client's address. `start_application` runs the ASGI application for a request.

        `on_last_answer` is called after the answer of an inference call that says `connection: close`.
        """
        self.slices: SlicedTransport | None = None  # over TLS
        self.transport = transport
        if is_ssl(transport):
            self.slices = SlicedTransport(transport, self._pause, self._resume)
            self.transport = cast(asyncio.Transport, self.slices)
        self._flow = flow
        self._infer = hub.infer
        self._settings = hub.settings
        self._max_pipeline = hub.settings.max_pipeline
        self._server_state = server_state
        self._caller = caller
        self._start_application = start_application
        self._on_last_answer = on_last_answer
        self.turns: deque[Turn] = deque()
        self.is_stopping = False  # the server stops, so the connection closes when no turn is left
        self._final: Turn | None = None  # the connection closes after this turn
        self._head: CallHead | None = None  # of the latest inference call that matched no template
        self._has_key = False  # whether the latest ASGI request had a valid key
        self._answer_rate: AnswerRate | None = None  # of the answers, while they wait for the client to read

    # turns

    def open(self, head: CallHead) -> InferCall:
        """Add an inference call to the turns, and return it; the inbox starts it when its body is complete."""
        call = self._infer.call(head, self.deliver, self._caller)
        self._head = head
        self.turns.append(call)
        return call

    def open_cycle(self, cycle: AsgiCycle) -> None:
        """Add a request for the ASGI application to the turns; the application starts now if no turn is before it."""
        self.turns.append(cycle)
        if self.is_stopping:
            self.close_after(cycle)
        self._advance()

    def repeat(self, template: RequestTemplate, data: bytes, request: bytes) -> None:
        """Start a request that matches a template: alone, or in a batch with other repeated requests.

        `data` holds its tensors, at the offsets of the template; `request` is the whole request.
        """
        call = InferCall(self._infer, template.head, self.deliver, self._caller)
        call.request = request
        turns = self.turns
        turns.append(call)
        if template.repeated_requests is not None:
            template.repeated_requests.join(call, template, data)
        else:
            call.repeat(template, data)
        if len(turns) >= self._max_pipeline:
            self._flow.pause_reading()

    def deliver(self, call: InferCall) -> None:
        """Called when an inference call has its answer: write it if its turn has come."""
        turns = self.turns
        if not turns or turns[0] is not call:
            return  # `_advance` sends it in its turn, or nothing does if the client has left
        turns.popleft()
        self._send(call)
        if turns or self._flow.read_paused:
            self._advance()

    def end_cycle(self) -> AsgiCycle | None:
        """Remove the first turn, an ASGI request whose answer is written, and return it; `advance` starts the next.

        None if the first turn is no ASGI request.
        """
        self._server_state.total_requests += 1
        turn = self.turns[0] if self.turns else None
        if not isinstance(turn, AsgiCycle):
            return None
        self.turns.popleft()
        self._has_key = turn.has_valid_key
        return turn

    def advance(self) -> None:
        """Write the next answers that are ready, and start the application if its turn has come, unless closing."""
        if not self.transport.is_closing():
            self._advance()

    def withdraw(self, cycle: AsgiCycle) -> bool:
        """Remove the last turn, which is `cycle`: its request is refused; False if its answer has begun already."""
        if cycle.response_started:
            return False
        self.turns.pop()
        cycle.disconnect()
        return True

    def keep_only_first(self) -> None:
        """Remove all turns: the first, whose answer is written, is not cancelled; the others are."""
        turns, self.turns = self.turns, deque()
        if turns:
            turns.popleft()
        _drop(turns)

    def close_after(self, turn: Turn) -> None:
        """Close the connection after the answer of this turn."""
        self._final = turn
        if isinstance(turn, AsgiCycle):
            turn.keep_alive = False

    def close_after_last(self) -> None:
        """Close the connection after the last turn, if there is one."""
        if self.turns:
            self.close_after(self.turns[-1])

    def stop(self) -> None:
        """The server stops: close after the last turn."""
        self.is_stopping = True
        self.close_after_last()

    def on_connection_lost(self) -> None:
        """Cancel all turns, and drop the references to the connection.

        The connection refers to the outbox: without this cycle it is freed at once, and not by the garbage collector.
        """
        turns, self.turns = self.turns, deque()
        _drop(turns)
        if self.slices is not None:
            self.slices.lost()
        del self._on_last_answer, self._start_application

    @property
    def has_running_call(self) -> bool:
        """Whether an inference call has begun work that would be lost if the connection closed."""
        return any(isinstance(turn, InferCall) and not turn.is_waiting for turn in self.turns)

    @property
    def has_valid_key(self) -> bool:
        """Whether the client has shown a valid key, in its latest answered ASGI request or its latest inference call.

        Inference calls that matched a template are not considered.
        """
        return self._has_key or (self._head is not None and self._infer.knows(self._head))

    def _advance(self) -> None:
        """Write the answers that are ready and first in order; start the application if its turn has come."""
        while self.turns:
            turn = self.turns[0]
            if isinstance(turn, AsgiCycle):
                if not turn.is_started:
                    turn.is_started = True
                    self._start_application(turn)
                break
            if turn.reply is None:
                break
            self.turns.popleft()
            self._send(turn)
        self._resume_reading()

    # writing

    def write_at_once(self, reply: Reply) -> None:
        """Answer a request that gets no turn. No turn may be open."""
        self._server_state.total_requests += 1
        self._write(reply, NOTHING)

    def write_continue(self) -> None:
        """Write `100 Continue`, which asks for the body of a request; no other turn may be before it."""
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _send(self, call: InferCall) -> None:
        reply = call.reply
        if reply is None or self.transport.is_closing():
            return
        self._server_state.total_requests += 1
        if call is not self._final and (self.turns or not self.is_stopping):
            self._write(reply, call.payloads)
            return
        self._write(with_close(reply), call.payloads)
        self._on_last_answer()

    def _write(self, reply: Reply, payloads: list[Payload]) -> None:
        beginning = reply.head_bytes(self._server_state.default_headers)
        if len(payloads) == 1 and len(payloads[0]) < BIG_PAYLOAD:
            self.transport.write(b"".join((beginning, payloads[0])))
        elif all(len(payload) < BIG_PAYLOAD for payload in payloads):
            self.transport.write(b"".join((beginning, *payloads)))
        else:
            self.transport.writelines([beginning, *payloads])

    # flow control

    def pause_writing(self) -> None:
        """Called when the write buffer of the transport is full."""
        if self.slices is not None:
            self.slices.full()
        if not self._flow.write_paused:
            self._pause()

    def resume_writing(self) -> None:
        """Called when the write buffer of the transport has drained."""
        if self.slices is None or self.slices.drained():
            self._resume()

    def limit_turns(self) -> None:
        """Stop reading if at least `max_pipeline` requests are unanswered; reading resumes at half of that number."""
        if len(self.turns) >= self._max_pipeline:
            self._flow.pause_reading()

    def is_unread(self, now: float) -> bool:
        """Whether the client reads the answers that wait for it more slowly than the settings allow.

        False while no answer waits to be read.
        """
        rate = self._answer_rate
        return rate is not None and now > rate.look(self.transport.get_write_buffer_size(), now)

    def _pause(self) -> None:
        self._flow.pause_writing()
        self._flow.pause_reading()
        settings, now = self._settings, asyncio.get_running_loop().time()
        left = self.transport.get_write_buffer_size()
        self._answer_rate = AnswerRate(now, settings.write_timeout, settings.min_send_rate, left, now)

    def _resume(self) -> None:
        self._flow.resume_writing()
        self._answer_rate = None
        self._resume_reading()

    def _resume_reading(self) -> None:
        turns = self.turns
        if self._flow.write_paused or len(turns) > self._max_pipeline // 2:
            return
        last = turns[-1] if turns else None
        if not (isinstance(last, AsgiCycle) and last.has_buffered_enough):
            self._flow.resume_reading()


def _drop(turns: deque[Turn]) -> None:
    """Cancel turns that will not be answered: inference calls, and ASGI requests, which see a disconnect."""
    for turn in turns:
        if isinstance(turn, AsgiCycle):
            turn.disconnect()
        else:
            turn.cancel()
