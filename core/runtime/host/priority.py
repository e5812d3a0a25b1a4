"""The scheduling priority of child processes, for background work of sessions and of the server."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
IDLE_PATIENCE = 2.0  # seconds that an idle child may wait beyond the wait it would have with a share
_WAIT_PER_SECOND = 4.0  # worst-case wait of a child with a share, per second of processor time


class Priority(enum.Enum):
    """The share of a contended processor that a child gets."""

    NORMAL = enum.auto()  # a full share
    IDLE = enum.auto()  # none (SCHED_IDLE): every other thread preempts it at once
    LOW = enum.auto()  # little (nice 19), but in time slices of some milliseconds, longer than a run of a small model
    SHARED = enum.auto()  # about a quarter of the time while another thread is busy (nice 5)

    @property
    def nice(self) -> int:
        return {Priority.NORMAL: 0, Priority.SHARED: 5}.get(self, 19)


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a process and its descendants use; 0 if the system does not say."""

    memory: int = 0  # bytes resident
    seconds: float = 0.0  # of processor time

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.memory + other.memory, self.seconds + other.seconds)


def set_priority(pid: int, priority: Priority) -> None:
    """Set the priority of a process that has just been started; no effect if it has ended.

    The priority never becomes higher than the one that the process inherited. The parent does this, not the process
    itself, because starting an interpreter already slows down other threads.
    """
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        inherited = os.getpriority(os.PRIO_PROCESS, pid)  # a nice value can only be raised
        os.setpriority(os.PRIO_PROCESS, pid, max(priority.nice, inherited))
        if priority is Priority.IDLE and sys.platform == "linux":
            with contextlib.suppress(PermissionError):  # a sandbox forbids it: the lowest priority remains
                os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def resource_usage(pid: int) -> Usage:
    """The resources that a process and its descendants use now. Processor time includes children that have ended.

    Of each process only the children that its main thread has started are found.
    """
    try:
        pages = int((_PROC / f"{pid}/statm").read_text().split()[1])
        # Own, and of children that have ended.
        times = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except (OSError, IndexError):
        return Usage()
    own = Usage(pages * os.sysconf("SC_PAGE_SIZE"), sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
    return sum((resource_usage(child) for child in _children(pid)), own)


def is_starved(pid: int, computed: float, modesty: float = IDLE_PATIENCE) -> bool:
    """Whether a thread of an idle process waited for a processor for more than `modesty` + 4 * `computed` seconds.

    `computed`: the seconds of processor time that the process and its descendants got. Raising the priority again would
    take privileges, so the caller restarts the process with a share.
    """
    return _wait_seconds(pid) > modesty + _WAIT_PER_SECOND * computed


def _wait_seconds(pid: int) -> float:
    """The longest time in seconds that a thread was ready but waited for a processor; 0 if Linux does not say.

    The threads are those of the process and its descendants. The sum of their waits says nothing: many threads that
    share one whole processor wait for each other.
    """
    own = [int(fields[1]) / 1e9 for fields in _of_threads(pid, "schedstat") if len(fields) > 1]
    return max([0.0, *own, *map(_wait_seconds, _children(pid))])


def _children(pid: int) -> list[int]:
    """The processes that a process has started and that have not been waited for; each thread lists its own."""
    return [int(child) for fields in _of_threads(pid, "children") for child in fields]


def _of_threads(pid: int, name: str) -> Iterator[list[str]]:
    """Yield the fields of the file `name` of each thread of a process. Threads that have ended are skipped."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(_PROC / f"{pid}/task"):
            with contextlib.suppress(OSError):
                yield (_PROC / f"{pid}/task/{thread}/{name}").read_text().split()
