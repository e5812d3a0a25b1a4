"""One request from admission to its answer."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

from lathe.server.batching.signature import BatchGroup
from lathe.server.datatypes import ELEMENT_OVERHEAD
from lathe.server.types import Tensors

if TYPE_CHECKING:
    from lathe.server.batching.execution import BatchResult
    from lathe.server.batching.padding import RequestPadding

Outcome: TypeAlias = Tensors | Exception
OnDone: TypeAlias = Callable[[Outcome], None]


class State(Enum):
    """WAITING -> STAGED -> RUNNING -> DONE; cancelling, expiring and refusing go to DONE at once.

    A batch that runs on the event loop's thread is not staged.
    """

    WAITING = auto()  # in a queue; may still be taken out
    STAGED = auto()  # taken out of the queue: part of the batch that runs next, or about to be refused
    RUNNING = auto()
    DONE = auto()  # answered, or cancelled by its caller


WAITING, STAGED, RUNNING, DONE = State  # global names: looking up a member of an Enum takes ten times as long


def _ignore(_outcome: Outcome) -> None:
    """The callback of a request whose caller left, or has not set it yet."""


class Entry:
    """A request's tensors, deadline and the callback that takes its outcome.

    The callback is called once, on the event loop, or never if the request is cancelled.

    `at_once`: the callback may be called already by the call that queues the request.
    """

    at_once = False

    __slots__ = (
        "charged_rows",
        "client",
        "deadline",
        "done",
        "group",
        "id",
        "inputs",
        "most_tokens",
        "nbytes",
        "padded",
        "parts",
        "priority",
        "ran",
        "rows",
        "since",
        "state",
        "timer",
        "tokens",
        "trace",
        "work",
    )

    def __init__(
        self,
        inputs: Tensors,
        group: BatchGroup,
        done: OnDone = _ignore,
        deadline: float | None = None,
        priority: int = 0,
        text: int = 0,
    ) -> None:
        """`text`: the bytes of all elements of BYTES tensors."""
        self.inputs = inputs
        self.group = group
        self.rows = group.rows or 1  # rows in a batch; 1 for a request that is never stacked
        self.work = group.work or 1
        self.done = done
        self.deadline = deadline  # monotonic seconds
        self.priority = priority  # 1 is the most urgent; 0: as the model's policy says
        self.nbytes = _size(inputs) + text
        self.padded: RequestPadding | None = None
        self.most_tokens = 0  # to which steps truncate each text; 0: as they are configured
        self.tokens = 0  # that steps have made of texts so far
        self.charged_rows = 0  # rows that were already charged to the client's quota
        self.client = ""  # the clients of a queue get equal shares of it
        self.since = 0.0  # monotonic seconds; set when queued
        self.state = WAITING
        self.ran: BatchResult | None = None  # the batch it was part of, once that has ended
        self.timer: TimerHandle | None = None
        self.id = ""  # the request id that the caller chose
        self.trace = ""  # the trace id if a trace is recorded; then the batch records its kernels
        self.parts: list[Entry] = []  # queued instead of a request that is too large for one batch

    @property
    def is_waiting(self) -> bool:
        """Whether the request, or each of its parts if it has any, waits or is staged: neither runs nor is done."""
        if self.parts:
            return all(part.is_waiting for part in self.parts)
        return self.state in (WAITING, STAGED)

    def pad(self, padded: RequestPadding, group: BatchGroup, nbytes: int) -> None:
        """Schedule padding for when the request runs; call before it is queued. `nbytes`: how much its inputs grow."""
        self.padded, self.group = padded, group
        self.rows, self.work = group.rows or 1, group.work or 1
        self.nbytes += nbytes

    def pad_now(self) -> None:
        """Apply scheduled padding now: for requests that do not run in a batch."""
        padded, done = self.padded, self.done
        if padded is not None:
            self.padded, self.inputs = None, padded.fill(self.inputs)
            self.done = lambda outcome: done(padded.cut(outcome))

    def start(self) -> None:
        """Mark the request as running, unless its caller has left."""
        if self.state is not DONE:
            self.state = RUNNING

    def finish(self, outcome: Outcome) -> None:
        """Pass the outcome to the callback, unless the request is already done or cancelled."""
        if self.state is DONE:
            return
        self.state = DONE
        self._release()(outcome)

    def abandon(self) -> None:
        """Mark the request as done without calling its callback: its caller left."""
        self.state = DONE
        self._release()

    def _release(self) -> OnDone:
        """Drop the inputs, the timer and the callback, and return the callback.

        The callback usually refers to this entry; kept, the cycle would wait for the garbage collector.
        """
        done, self.done = self.done, _ignore
        self.inputs = {}
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return done


class DirectEntry(Entry):
    """An entry whose callback may be called by the call that queues it."""

    __slots__ = ()
    at_once = True


def _size(inputs: Tensors) -> int:
    """The bytes of the inputs; of BYTES tensors only the overhead of their elements, without the texts.

    The decoder passes the bytes of the texts as `text`. Summing them here would take too long, because a tensor may
    have many elements.
    """
    nbytes = 0
    for array in inputs.values():
        nbytes += array.size * ELEMENT_OVERHEAD if array.dtype.hasobject else array.nbytes
    return nbytes
