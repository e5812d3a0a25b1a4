"""The child of a session: how it gets a processor that others want, too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from core.runtime import background, child_python
from core.runtime.background import Background
from core.runtime.priority import Priority, lower

Started = list[tuple[Priority, bool, int]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Of each child, which sleeps for as long as it is told: what it was given, whether it is idle, its niceness."""
    found: Started = []

    def noting(pid: int, priority: Priority) -> None:
        os.setpriority(os.PRIO_PROCESS, pid, 1)
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))  # whatever this process was started with
        lower(pid, priority)
        found.append((priority, os.sched_getscheduler(pid) == os.SCHED_IDLE, os.getpriority(os.PRIO_PROCESS, pid)))

    sleeper = [sys.executable, "-S", "-c", "import sys, time; time.sleep(float(sys.argv[-1]))"]
    monkeypatch.setattr(child_python, "command", lambda *arguments: [*sleeper, *arguments])
    monkeypatch.setattr(background, "_LOOK", 0.01)
    monkeypatch.setattr(background, "lower", noting)
    return found


SHARED, IDLE = (Priority.SHARED, False, 5), (Priority.IDLE, True, 19)


def test_who_is_waited_for_has_a_share_and_who_is_not_is_idle(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "is_starved", lambda *_: False)  # whatever else this machine does
    worker = Background()
    assert worker.run_child(["0"])
    assert worker.run_child(["0"], patient=True)
    assert started == [SHARED, IDLE]


def test_an_idle_child_that_others_leave_no_time_begins_anew(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["60"]

    def starved(_pid: int, _computed: float) -> bool:
        arguments[0] = "0"
        return True

    monkeypatch.setattr(background, "is_starved", starved)
    assert Background().run_child(arguments, patient=True)
    assert started == [IDLE, SHARED]


def test_who_is_nicer_already_stays_so() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.setpriority(os.PRIO_PROCESS, child.pid, 12)
        lower(child.pid, Priority.SHARED)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 12
        child.kill()
