"""HTTP pipelining: answers the requests of one connection in the order in which they arrived.

The requests of a connection are a deque of turns. Each turn is an `InferCall` or an ASGI cycle, and only the first may
write. So pipelined inference calls run at the same time and share batches, while their answers keep their order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl
from uvicorn.server import ServerState

from lathe.server.access.authority import Caller
from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.codec.reply import Reply, with_close
from lathe.server.api.connection.hub import Hub
from lathe.server.api.connection.sliced_transport import SlicedTransport
from lathe.server.api.connection.transfer_rates import AnswerRate, UploadRate
from lathe.server.api.inference.infer import InferCall

LINGER, LINGER_PAUSE = 30.0, 5.0  # seconds for discarding the rest of an answered request: in total, between two reads
BIG_PAYLOAD = 1 << 16  # bytes from which payloads are written without being joined to one buffer


@dataclass(slots=True)
class AsgiTurn:
    """A request that the ASGI application answers."""

    cycle: RequestResponseCycle
    app: ASGI3Application
    started: bool = False


class AnswerPipeline(HttpToolsProtocol):
    """The answering half of a connection; the subclass reads requests and opens turns."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.hub: Hub = app_state["hub"]
        self.caller = ""  # the client's address
        self.turns: deque[InferCall | AsgiTurn] = deque()
        self.final: InferCall | AsgiTurn | None = None  # the connection closes after this turn
        self.head: CallHead | None = None  # of the latest inference call
        self.has_key = False  # whether the latest ASGI request had a valid key
        self.stopping = False
        self.deaf = False  # all further input is discarded
        self.deadline = math.inf  # loop time by which the message being received must be complete
        self.slices: SlicedTransport | None = None  # over TLS
        self.answer_rate: AnswerRate | None = (
            None  # transfer rate of the answers, while they wait for the client to read
        )
        self.gone_by = math.inf  # loop time by which a message that is already answered must have ended
        self.receiving_cycle: RequestResponseCycle | None = None  # the ASGI request whose body is being received
        self.pace: UploadRate | None = None  # transfer rate of that body, if it is a file upload
        self.most: float = 0  # the most bytes of that body

    @property
    def is_receiving(self) -> bool:
        """Whether a message has been received in part."""
        raise NotImplementedError

    # flow control

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the connection; over TLS, answers are written in slices."""
        if is_ssl(transport):
            self.slices = SlicedTransport(transport, self._pause, self._resume)
            transport = cast(asyncio.Transport, self.slices)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the slices that wait: the connection is lost."""
        if self.slices is not None:
            self.slices.lost()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called by the transport when its write buffer is full."""
        if self.slices is not None:
            self.slices.full()
        if not self.flow.write_paused:
            self._pause()

    def resume_writing(self) -> None:
        """Called by the transport when its write buffer has drained."""
        if self.slices is None or self.slices.drained():
            self._resume()

    def _pause(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        settings, now, left = self.hub.settings, self.loop.time(), self.transport.get_write_buffer_size()
        self.answer_rate = AnswerRate(now, settings.write_timeout, settings.min_send_rate, left, now)

    def _resume(self) -> None:
        super().resume_writing()
        self.answer_rate = None
        self._resume_reading()

    def _resume_reading(self) -> None:
        if not (
            self.flow.write_paused
            or len(self.turns) > self.hub.settings.max_pipeline // 2
            or self._has_buffered_enough()
        ):
            self.flow.resume_reading()

    def _has_buffered_enough(self) -> bool:
        """Whether the application has not yet read more of the body than should be buffered."""
        cycle = self.receiving_cycle
        return cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT

    # turns

    def _open(self, head: CallHead) -> InferCall:
        call = self.hub.infer.call(head, self._deliver, self.caller)
        self.head = head
        self.turns.append(call)
        return call

    def _deliver(self, call: InferCall) -> None:
        turns = self.turns
        if not turns or turns[0] is not call:
            return  # `_advance` sends it in its turn, or nothing does if the client has left
        turns.popleft()
        self._send(call)
        if turns or self.flow.read_paused:
            self._advance()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        turn = AsgiTurn(cycle, app)
        self.turns.append(turn)
        if self.stopping:
            self._close_after(turn)
        self._advance()

    def on_response_complete(self) -> None:
        """Called when the application has written its answer: starts the next turn."""
        self.server_state.total_requests += 1
        if self.turns and isinstance(turn := self.turns[0], AsgiTurn):
            self.turns.popleft()
            self.has_key = has_valid_key(turn.cycle)
            if turn.cycle is self.receiving_cycle and not self.deaf:
                self._start_linger_deadline()
        if not self.transport.is_closing():
            self._advance()

    def _advance(self) -> None:
        """Write the answers that are ready and first in order; start the application if its turn has come."""
        while self.turns:
            turn = self.turns[0]
            if isinstance(turn, AsgiTurn):
                if not turn.started:
                    turn.started = True
                    super()._start_asgi_task(turn.cycle, turn.app)
                break
            if turn.reply is None:
                break
            self.turns.popleft()
            self._send(turn)
        self._resume_reading()

    # output

    def _send(self, call: InferCall) -> None:
        transport, reply = self.transport, call.reply
        if reply is None or transport.is_closing():
            return
        self.server_state.total_requests += 1
        if call is not self.final and (self.turns or not self.stopping):
            self._write(reply, call.payloads)
            return
        self._write(with_close(reply), call.payloads)
        if self.deaf and self.is_receiving:
            self._linger()
        else:
            transport.close()

    def _write(self, reply: Reply, payloads: list[bytes | memoryview]) -> None:
        beginning = reply.head_bytes(self.server_state.default_headers)
        if len(payloads) == 1 and len(payloads[0]) < BIG_PAYLOAD:
            self.transport.write(b"".join((beginning, payloads[0])))
        elif all(len(payload) < BIG_PAYLOAD for payload in payloads):
            self.transport.write(b"".join((beginning, *payloads)))
        else:
            self.transport.writelines([beginning, *payloads])

    def _close_after(self, turn: InferCall | AsgiTurn) -> None:
        self.final = turn
        if isinstance(turn, AsgiTurn):
            turn.cycle.keep_alive = False

    def _close_after_answer(self) -> None:
        """Close the connection after an answer of the application; discard the rest of its request before."""
        if not self.is_receiving:
            self.transport.close()
            return
        self.deaf = True
        turns, self.turns = self.turns, deque()
        self._drop(list(turns)[1:])
        self._linger()

    @staticmethod
    def _drop(turns: Iterable[InferCall | AsgiTurn]) -> None:
        """Cancel turns that will not be answered."""
        for turn in turns:
            if isinstance(turn, AsgiTurn):
                disconnect(turn.cycle)
            else:
                turn.cancel()

    def _linger(self) -> None:
        """Discard further input before closing (lingering close).

        Closing at once would reset the connection while the client still sends, and the client could lose the answer.
        """
        self._start_linger_deadline()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()

    def _start_linger_deadline(self) -> None:
        """Set the deadlines for the rest of a message that is already answered; the rest is discarded.

        They work like lingering_time and lingering_timeout of nginx.
        """
        self.most, self.pace = math.inf, None
        now = self.loop.time()
        self.gone_by = min(self.gone_by, now + LINGER)
        self.deadline = min(self.gone_by, now + LINGER_PAUSE)

    def _extend_linger_deadline(self) -> None:
        """Extend the deadline, as a part of a message that is already answered arrived."""
        self.deadline = min(self.gone_by, self.hub.now + LINGER_PAUSE)


def has_valid_key(cycle: RequestResponseCycle) -> bool:
    """Whether an answered request had a valid key."""
    caller = cycle.scope.get("state", {}).get("caller")
    return isinstance(caller, Caller) and caller.key is not None


def disconnect(cycle: RequestResponseCycle) -> None:
    """Notify the application that its client has left, and never send `100 Continue` for it.

    The transport may be closed, and a `100 Continue` after the answer would look like a second answer.
    """
    cycle.disconnected = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
