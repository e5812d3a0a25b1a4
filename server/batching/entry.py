"""One admitted request on its way through a queue."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

from server.batching.signature import Group
from server.datatypes import ELEMENT
from server.types import Tensors

if TYPE_CHECKING:
    from server.batching.execution import Ran
    from server.batching.padding import Padded

Outcome: TypeAlias = Tensors | Exception
Done: TypeAlias = Callable[[Outcome], None]


class State(Enum):
    """WAITING -> STAGED -> RUNNING -> DONE; cancelling, expiring and refusing go to DONE at once."""

    WAITING = auto()  # in a queue; may still be taken out
    STAGED = auto()  # part of the batch that runs next
    RUNNING = auto()
    DONE = auto()  # answered, or given up by its caller


WAITING, STAGED, RUNNING, DONE = State  # for every request: asking an Enum for a member takes ten times as long


class Entry:
    """A request's tensors, deadline and the function that takes its outcome (called once, on the event loop).

    ``at_once``: that may be before it is queued, in the call that is to queue it.
    """

    at_once = False

    __slots__ = (
        "client",
        "deadline",
        "done",
        "group",
        "id",
        "inputs",
        "nbytes",
        "padded",
        "paid",
        "parts",
        "priority",
        "ran",
        "rows",
        "since",
        "state",
        "timer",
        "trace",
        "work",
    )

    def __init__(
        self,
        inputs: Tensors,
        group: Group,
        done: Done,
        deadline: float | None = None,
        priority: int = 0,
        text: int = 0,
    ) -> None:
        """``text``: bytes that the elements of BYTES tensors have."""
        self.inputs = inputs
        self.group = group
        self.rows = group.rows or 1  # that it adds to a batch; 1 for what is never stacked
        self.work = group.work or 1
        self.done = done
        self.deadline = deadline  # monotonic seconds
        self.priority = priority  # 1 is the most urgent; 0: as the model's policy says
        self.nbytes = _size(inputs) + text
        self.padded: Padded | None = None
        self.paid = 0  # rows that its client's quota was charged with already
        self.client = ""  # whose it is; those who share a queue get equal shares of it
        self.since = 0.0  # monotonic seconds; set when queued
        self.state = WAITING
        self.ran: Ran | None = None  # the batch it was part of, once that has ended
        self.timer: TimerHandle | None = None
        self.id = ""  # as its caller names it
        self.trace = ""  # the id of its trace, where that is recorded: then its batch tells what it consists of
        self.parts: list[Entry] = []  # queued in place of a request too large for one batch

    @property
    def is_waiting(self) -> bool:
        """Whether no part of it has begun to run."""
        if self.parts:
            return all(part.is_waiting for part in self.parts)
        return self.state in (WAITING, STAGED)

    def pad(self, padded: Padded, group: Group, nbytes: int) -> None:
        """Have its inputs filled up when it runs, before it is queued; ``nbytes``: by how much they grow."""
        self.padded, self.group = padded, group
        self.rows, self.work = group.rows or 1, group.work or 1
        self.nbytes += nbytes

    def pad_here(self) -> None:
        """Fill its inputs up now, if they have to be: for requests that no batch consists of."""
        padded, tell = self.padded, self.done
        if padded is not None:
            self.padded, self.inputs = None, padded.fill(self.inputs)
            self.done = lambda outcome: tell(padded.cut(outcome))

    def start(self) -> None:
        """Note that it runs, unless its caller has left."""
        if self.state is STAGED:
            self.state = RUNNING

    def finish(self, outcome: Outcome) -> None:
        """Hand the outcome over, unless the caller left before."""
        if self.state is DONE:
            return
        self.state = DONE
        self._let_go()(outcome)

    def abandon(self) -> None:
        """The caller left: nobody is told any more."""
        self.state = DONE
        self._let_go()

    def _let_go(self) -> Done:
        """Drop what is held; `done` most often leads back here, and a cycle would wait for the garbage collector."""
        done, self.done = self.done, _nobody
        self.inputs = {}
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return done


class DirectEntry(Entry):
    """One whose caller is ready for the outcome."""

    __slots__ = ()
    at_once = True


def _size(inputs: Tensors) -> int:
    """Return the bytes that inputs take. Texts are not looked at, as there may be many: who made them says how many
    bytes they have."""
    nbytes = 0
    for array in inputs.values():
        nbytes += array.size * ELEMENT if array.dtype.hasobject else array.nbytes
    return nbytes


def _nobody(_outcome: Outcome) -> None:
    """Takes the outcome of a request whose caller is gone."""
