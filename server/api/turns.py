"""What a connection answers, and in which order.

What a client sent is a deque of turns; each is an :class:`InferCall` or an ASGI cycle, and only the first may write. So
pipelined calls run and batch together while their answers keep their order.
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

from server.access.authority import Caller
from server.api.callhead import CallHead
from server.api.hub import Hub
from server.api.infer import InferCall
from server.api.pace import Outflow, Pace
from server.api.reply import Reply, closing
from server.api.slices import Slices

LINGER, LINGER_PAUSE = 30.0, 5.0  # seconds in which what nobody will read may still come, and between two reads
BIG_PAYLOAD = 1 << 16  # bytes from which payloads are written as they are instead of joined


@dataclass(slots=True)
class AsgiTurn:
    """A request that the application answers."""

    cycle: RequestResponseCycle
    app: ASGI3Application
    started: bool = False


class TurnTaking(HttpToolsProtocol):
    """The answering half of a connection; who subclasses it opens turns."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.hub: Hub = app_state["hub"]
        self.caller = ""  # whose address this is
        self.turns: deque[InferCall | AsgiTurn] = deque()
        self.final: InferCall | AsgiTurn | None = None  # the connection closes after this turn
        self.head: CallHead | None = None  # of the latest call of inference
        self.is_known = False  # whether the latest other request showed a key
        self.stopping = False
        self.deaf = False  # nothing that still arrives is read
        self.deadline = math.inf  # loop time by which the message being received must be there
        self.slices: Slices | None = None  # over TLS
        self.outflow: Outflow | None = None  # of answers that wait for the client to read
        self.gone_by = math.inf  # loop time by which a message that is answered already must be there
        self.receiving_cycle: RequestResponseCycle | None = None  # whose body is coming
        self.pace: Pace | None = None  # of that body, where it is a file
        self.most: float = 0  # bytes it may have

    @property
    def is_receiving(self) -> bool:
        """Whether part of a message is there."""
        raise NotImplementedError

    # flow control

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; what it is sent over TLS goes in slices."""
        if is_ssl(transport):
            self.slices = Slices(transport, self._pause, self._resume)
            transport = cast(asyncio.Transport, self.slices)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        if self.slices is not None:
            self.slices.lost()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The transport has enough."""
        if self.slices is not None:
            self.slices.full()
        if not self.flow.write_paused:
            self._pause()

    def resume_writing(self) -> None:
        """The transport takes more."""
        if self.slices is None or self.slices.drained():
            self._resume()

    def _pause(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        settings, now, left = self.hub.settings, self.loop.time(), self.transport.get_write_buffer_size()
        self.outflow = Outflow(now, settings.write_timeout, settings.min_send_rate, left, now)

    def _resume(self) -> None:
        super().resume_writing()
        self.outflow = None
        self._resume_reading()

    def _resume_reading(self) -> None:
        if not (self.flow.write_paused or len(self.turns) > self.hub.settings.max_pipeline // 2 or self._has_enough()):
            self.flow.resume_reading()

    def _has_enough(self) -> bool:
        """Whether the application has more to read than it should be given beforehand."""
        cycle = self.receiving_cycle
        return cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT

    # turns are taken

    def _open(self, head: CallHead) -> InferCall:
        call = self.hub.infer.call(head, self._deliver, self.caller)
        self.head = head
        self.turns.append(call)
        return call

    def _deliver(self, call: InferCall) -> None:
        turns = self.turns
        if not turns or turns[0] is not call:
            return  # sent when its turn comes, or never if the client is gone
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
        """The application's answer is written."""
        self.server_state.total_requests += 1
        if self.turns and isinstance(turn := self.turns[0], AsgiTurn):
            self.turns.popleft()
            self.is_known = shows_key(turn.cycle)
            if turn.cycle is self.receiving_cycle and not self.deaf:
                self._expect_little()
        if not self.transport.is_closing():
            self._advance()

    def _advance(self) -> None:
        """Write every answer that is ready and next in line; start the application if it is its turn."""
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

    # bytes go out

    def _send(self, call: InferCall) -> None:
        transport, reply = self.transport, call.reply
        if reply is None or transport.is_closing():
            return
        self.server_state.total_requests += 1
        if call is not self.final and (self.turns or not self.stopping):
            self._write(reply, call.payloads)
            return
        self._write(closing(reply), call.payloads)
        if self.deaf and self.is_receiving:
            self._linger()
        else:
            transport.close()

    def _write(self, reply: Reply, payloads: list[bytes | memoryview]) -> None:
        beginning = reply.beginning(self.server_state.default_headers)
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

    def _close_answered(self) -> None:
        """Close the connection after an answer of the application."""
        if not self.is_receiving:
            self.transport.close()
            return
        self.deaf = True
        turns, self.turns = self.turns, deque()
        self._drop(list(turns)[1:])
        self._linger()

    @staticmethod
    def _drop(turns: Iterable[InferCall | AsgiTurn]) -> None:
        """These will not be answered."""
        for turn in turns:
            if isinstance(turn, AsgiTurn):
                disconnect(turn.cycle)
            else:
                turn.cancel()

    def _linger(self) -> None:
        """Closing at once would reset the connection under a client that is still sending, and lose the answer."""
        self._expect_little()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()

    def _expect_little(self) -> None:
        """The message being received is answered: what is missing of it is not read, and need not be waited for long
        (as nginx: lingering_time, lingering_timeout)."""
        self.most, self.pace = math.inf, None
        now = self.loop.time()
        self.gone_by = min(self.gone_by, now + LINGER)
        self.deadline = min(self.gone_by, now + LINGER_PAUSE)

    def _still_sending(self) -> None:
        """Part of such a message came."""
        self.deadline = min(self.gone_by, self.hub.now + LINGER_PAUSE)


def shows_key(cycle: RequestResponseCycle) -> bool:
    """Say whether a request that was answered came with a key that the server knows."""
    caller = cycle.scope.get("state", {}).get("caller")
    return isinstance(caller, Caller) and caller.key is not None


def disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application that its client is gone. It is not asked for the body any more: the transport may be beyond
    writing, and what asked the client to go on would be a second answer."""
    cycle.disconnected = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
