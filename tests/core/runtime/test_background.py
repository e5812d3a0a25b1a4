"""The compile process of a session and its CPU priority on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lathe.core.runtime.host import child_python
from lathe.core.runtime.host.priority import Priority, set_priority
from lathe.core.runtime.session import background
from lathe.core.runtime.session.background import Background

Started = list[tuple[Priority, bool, int]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The started children, which only sleep: the priority, whether it is SCHED_IDLE, and the niceness of each."""
    found: Started = []

    def noting(pid: int, priority: Priority) -> None:
        os.setpriority(os.PRIO_PROCESS, pid, 1)
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))  # whatever niceness this process has
        set_priority(pid, priority)
        found.append((priority, os.sched_getscheduler(pid) == os.SCHED_IDLE, os.getpriority(os.PRIO_PROCESS, pid)))

    sleeper = [sys.executable, "-S", "-c", "import sys, time; time.sleep(float(sys.argv[-1]))"]
    monkeypatch.setattr(child_python, "command", lambda *arguments: [*sleeper, *arguments])
    monkeypatch.setattr(background, "_CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(background, "set_priority", noting)
    return found


SHARED, IDLE = (Priority.SHARED, False, 5), (Priority.IDLE, True, 19)


def test_a_child_is_idle_unless_a_run_waits_for_it(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "is_starved", lambda *_: False)  # whatever the load of this machine
    worker = Background()
    assert worker.run_child(["0"])
    assert worker.run_child(["0"], patient=True)
    assert started == [SHARED, IDLE]


def test_a_starved_idle_child_is_restarted(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["60"]

    def starved(_pid: int, _computed: float) -> bool:
        arguments[0] = "0"
        return True

    monkeypatch.setattr(background, "is_starved", starved)
    assert Background().run_child(arguments, patient=True)
    assert started == [IDLE, SHARED]


def test_a_higher_niceness_is_kept() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.setpriority(os.PRIO_PROCESS, child.pid, 12)
        set_priority(child.pid, Priority.SHARED)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 12
        child.kill()
