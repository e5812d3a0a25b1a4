"""Resources and waits of processes, from a /proc of files: all threads and all descendants count."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from lathe.core.runtime.host import priority
from lathe.core.runtime.host.priority import Usage, is_starved, resource_usage

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(priority, "_PROC", tmp_path)
    return tmp_path


def process(proc: Path, pid: int, pages: int, seconds: int, threads: Mapping[int, tuple[float, str]]) -> None:
    """A process with a resident size and a time; each of its threads has waited some seconds, and has children."""
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "statm").write_text(f"9 {pages} 3")
    (folder / "stat").write_text(f"{pid} (a ) name) S {' '.join(['7'] * 10)} {seconds * TICKS} 0 0 0 5")
    for thread, (waited, children) in threads.items():
        (folder / "task" / str(thread)).mkdir(parents=True)
        (folder / "task" / str(thread) / "schedstat").write_text(f"1 {int(waited * 1e9)} 1\n")
        (folder / "task" / str(thread) / "children").write_text(children)


def test_children_of_all_threads_count(proc: Path) -> None:
    process(proc, 1, 10, 2, {1: (0, "20 "), 2: (0, "30 40 ")})
    process(proc, 20, 100, 1, {20: (0, "")})
    process(proc, 30, 1000, 4, {30: (0, ""), 31: (0, "50")})
    process(proc, 50, 10_000, 8, {50: (0, "")})
    assert resource_usage(1) == Usage(11_110 * PAGE, 15)
    assert resource_usage(40) == Usage()


def test_the_thread_that_waited_longest_decides(proc: Path) -> None:
    process(proc, 1, 1, 1, {1: (0.5, ""), 2: (6.5, ""), 3: (3, "20")})
    process(proc, 20, 1, 1, {20: (0, ""), 21: (8.5, "")})
    assert is_starved(1, 1.5) and not is_starved(1, 1.7)
    (proc / "20" / "task" / "21" / "schedstat").unlink()
    assert is_starved(1, 1.1) and not is_starved(1, 1.2)
    assert not is_starved(99, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_that_a_thread_started_counts() -> None:
    children: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def start() -> None:
        code = "import os; os.write(1, b'x'); os.read(0, 1)"
        pipe = subprocess.PIPE
        children.append(subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe))
        assert children[0].stdout is not None
        children[0].stdout.read(1)
        ready.set()
        ended.wait()

    ready = threading.Event()
    thread = threading.Thread(target=start)
    thread.start()
    ready.wait()
    child = resource_usage(children[0].pid).memory
    own = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    assert child > 0 and resource_usage(os.getpid()).memory >= (own + child) * 0.9
    children[0].communicate(b"x")
    ended.set()
    thread.join()
