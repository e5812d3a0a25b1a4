"""An open-loop generator: sends requests by a schedule, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from loadtest.arrivals import Times
from loadtest.connection import Connection, Target
from loadtest.pacing import TICK, Pacer
from loadtest.stats import WRONG, Log
from loadtest.wire import Response

Check = Callable[[int, float, float, Response], str | None]
"""`(request number, when sent, when answered, answer)` -> what is wrong with an accepted answer, or None."""

RECONNECT_PAUSE = 0.05  # seconds
FIRST_ANSWER = 60.0  # seconds for the first answer, beyond the time of a measurement
MANY = 500_000  # more requests than a closed loop completes in one measurement


class OpenLoop:
    """Sends `requests[i % len(requests)]` at `due[i]`, over at most `connections` connections.

    A request waits here while all connections are busy. Its latency is measured from `due[i]`, so the wait counts.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[bytes],
        due: Times,
        connections: int,
        check: Check | None = None,
        tick: float = TICK,
    ) -> None:
        self.target, self.requests, self.check, self.limit = target, requests, check, connections
        self.log = Log.of(due)
        self.connections: list[Connection] = []
        self.idle: list[Connection] = []
        self.backlog: deque[int] = deque()
        self.due_count = self.answered = 0
        self.all_answered = asyncio.Event()
        self.pacer = Pacer(due, self._fire, tick)
        self.repairs: set[asyncio.Task[None]] = set()

    async def run(self, patience: float = 30.0) -> Log:
        """Send all requests on schedule, and return the log.

        Requests without a response `patience` seconds after the last one was due count as failed. OSError if the
        connections cannot be opened.
        """
        self.connections = [await self.target.connect() for _ in range(self.limit)]
        self.idle = list(self.connections)
        self.pacer.start()
        try:
            await self.pacer.finished.wait()
            self._check_quiet()
            async with asyncio.timeout(patience):
                await self.all_answered.wait()
        except TimeoutError:
            pass  # in the log these requests keep the status UNANSWERED
        finally:
            self._close()
        return self.log.only(~np.isnan(self.log.sent)) if self.pacer.stopped.is_set() else self.log

    def stop(self) -> None:
        """Stop sending. `run` then waits for the sent requests' responses, and returns a log of only these requests."""
        self.pacer.stopped.set()
        self.answered += len(self.backlog)
        self.backlog.clear()

    def _close(self) -> None:
        for repair in self.repairs:
            repair.cancel()
        for connection in self.connections:
            connection.waiting = None
            connection.close()

    def _fire(self, first: int, last: int) -> None:
        if self.pacer.stopped.is_set():
            return
        self.due_count = last
        self.log.taken[first:last] = time.monotonic() - self.pacer.start_time
        self.backlog.extend(range(first, last))
        while self.backlog and self.idle:
            self._next(self.idle.pop())

    def _next(self, connection: Connection) -> None:
        """Send the next request over a free connection, or replace the connection if it is closed."""
        if not connection.is_usable:
            repair = asyncio.get_running_loop().create_task(self._reconnect())
            self.repairs.add(repair)
            repair.add_done_callback(self.repairs.discard)
        elif self.backlog:
            self._send(connection, self.backlog.popleft())
        else:
            self.idle.append(connection)

    def _send(self, connection: Connection, number: int) -> None:
        connection.number = number
        self.log.sent[number] = time.monotonic() - self.pacer.start_time
        connection.send(self.requests[number % len(self.requests)], self._answered)

    def _answered(self, connection: Connection, response: Response | None) -> None:
        number, received = connection.number, time.monotonic()
        self.log.done[number] = received - self.pacer.start_time
        if response is not None:
            self._record(number, received, response)
        self.answered += 1
        self._next(connection)
        self._check_quiet()

    def _record(self, number: int, received: float, response: Response) -> None:
        self.log.status[number] = response.status
        if self.check is not None and response.status == 200:
            sent = float(self.log.sent[number]) + self.pacer.start_time
            complaint = self.check(number, sent, received, response)
            if complaint is not None:
                self.log.status[number] = WRONG
                self.log.complaints[complaint] += 1

    def _check_quiet(self) -> None:
        if self.answered >= self.due_count and self.pacer.finished.is_set():
            self.all_answered.set()

    async def _reconnect(self) -> None:
        while True:
            try:
                connection = await self.target.connect()
            except OSError:
                await asyncio.sleep(RECONNECT_PAUSE)
            else:
                self.connections.append(connection)
                return self._next(connection)


async def capacity(target: Target, requests: Sequence[bytes], connections: int, seconds: float) -> float:
    """The capacity of a closed loop: accepted responses/s with every connection always busy, for `seconds`.

    Longer if no request is answered in that time. RuntimeError if none is within `FIRST_ANSWER` seconds more.
    """
    loop = OpenLoop(target, requests, np.zeros(MANY), connections)
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(seconds)
    end = time.monotonic() + FIRST_ANSWER
    while not loop.answered and time.monotonic() < end:
        await asyncio.sleep(TICK)
    any_answered = loop.answered > 0
    loop.stop()
    log = await running
    if not any_answered:
        raise RuntimeError(f"no request was answered within {seconds + FIRST_ANSWER:g} s")
    return float(log.accepted.sum() / np.nanmax(log.done))
