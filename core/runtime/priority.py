"""How child processes get a processor that others want, too: those of sessions and those of the server."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from dataclasses import dataclass
from pathlib import Path

MODESTY = 2.0  # seconds an idle child lets others go first beyond what it would wait with a share of its own
_WAITS = 4.0  # seconds that a child with a share of the processors waits for each that it computes, at the worst


class Priority(enum.Enum):
    """What a child gets of a processor that others want."""

    NORMAL = enum.auto()  # as much as anybody
    IDLE = enum.auto()  # nothing: whoever else wants it is let in at once
    LOW = enum.auto()  # little, but then for some milliseconds, which is longer than a small model runs
    SHARED = enum.auto()  # a quarter of the time that one thread which never rests would like

    @property
    def nice(self) -> int:
        return {Priority.NORMAL: 0, Priority.SHARED: 5}.get(self, 19)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants take; 0 where the system does not say."""

    memory: int = 0  # bytes resident
    seconds: float = 0.0  # of processor time

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.memory + other.memory, self.seconds + other.seconds)


def lower(pid: int, priority: Priority) -> None:
    """Give a process that has just been started its priority.

    Its parent does it, not the process itself: starting an interpreter is work enough to be felt by others.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended
        inherited = os.getpriority(os.PRIO_PROCESS, pid)  # there is no way back from that
        os.setpriority(os.PRIO_PROCESS, pid, max(priority.nice, inherited))
        if priority is Priority.IDLE and sys.platform == "linux":
            with contextlib.suppress(PermissionError):  # where a sandbox forbids it the lowest priority has to do
                os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def usage(pid: int) -> Usage:
    """Return what a process and its descendants take at the moment; processor time counts what they waited for."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]  # own, and of those waited for
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return Usage()
    own = Usage(pages * os.sysconf("SC_PAGE_SIZE"), sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
    return sum((usage(int(child)) for child in below), own)


def is_starved(pid: int, computed: float, modesty: float = MODESTY) -> bool:
    """Whether others have left an idle process, which has computed for so many seconds, no time for long enough.

    The way back from idleness takes privileges, so it then has to begin anew with a share.
    """
    return _waited(pid) > modesty + _WAITS * computed


def _waited(pid: int) -> float:
    """For how many seconds a process has been ready to run while others did; 0 where Linux does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
