"""A child whose start fails half-way is killed, and nothing of it is left: no process, no open file."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from lathe.server.errors import Unavailable
from lathe.server.processes import child_process, fork_client, stage_children
from lathe.server.processes.child_process import start
from lathe.server.processes.fork_client import IS_SUPPORTED, ForkClient
from lathe.server.processes.stage_children import Children, Limits

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
Run = Callable[[Coroutine[Any, Any, None]], None]
LOOPS: list[Run] = [asyncio.run, uvloop.run]
each_loop = pytest.mark.parametrize("run", LOOPS, ids=["asyncio", "uvloop"])


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that `start` has started."""
    found = []
    spawn = child_process._spawn

    def noting(*arguments: Any) -> subprocess.Popen[bytes]:
        found.append(spawn(*arguments))
        return found[-1]

    monkeypatch.setattr(child_process, "_spawn", noting)
    return found


def failing(original: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, whose call with this number fails."""
    calls = iter(range(1, 100))

    def function(*arguments: Any) -> Any:
        if next(calls) == at:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(*arguments)

    return function


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def check_open_files(expected: int) -> None:
    """The loop may close what was connected in its next iterations."""
    end = time.monotonic() + 5
    while (found := open_files()) != expected:
        assert time.monotonic() < end, (found, expected)
        await asyncio.sleep(0.01)


@each_loop
@pytest.mark.parametrize(("name", "at"), [("set_priority", 1), ("open_reader", 1), ("open_reader", 2)])
def test_a_failure_after_the_start_kills_the_child(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]], run: Run, name: str, at: int
) -> None:
    async def scenario() -> None:
        await (await start([sys.executable, "-c", ""])).wait()  # libuv opens a file at the first pipe of a loop
        before = open_files()
        with monkeypatch.context() as patched:
            patched.setattr(child_process, name, failing(getattr(child_process, name), at))
            with pytest.raises(OSError, match="Too many open files"):
                await start(SLEEPER)
        _, child = children
        assert child.returncode == -9
        await check_open_files(before)

    run(scenario())


@each_loop
def test_a_cancelled_start_whose_pipes_cannot_be_read_kills_the_child(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]], run: Run
) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        async def fails(pipe: Any) -> Any:
            await gate.wait()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(child_process, "open_reader", fails)
        starting = asyncio.ensure_future(start(SLEEPER))
        while not children:  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert children[0].returncode == -9

    run(scenario())


@pytest.mark.skipif(not IS_SUPPORTED, reason="Linux only")
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_fork_whose_pipes_cannot_be_opened_leaves_nothing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The calls 1 and 2 make the pipes, the calls 3 and 4 connect them."""

    async def scenario() -> None:
        forks = ForkClient(1 << 30, ["tests.server.processes.sleeper"])
        try:
            await (await forks.start(["0"])).wait()  # from here on the fork server has imported everything
            before = open_files()
            with monkeypatch.context() as patched:
                if at <= 2:
                    patched.setattr(fork_client.os, "pipe", failing(os.pipe, at))
                else:
                    patched.setattr(child_process, "open_reader", failing(child_process.open_reader, at - 2))
                with pytest.raises(OSError, match="Too many open files"):
                    await forks.start(["60"])
            while not forks.idle:  # noqa: ASYNC110 - nothing sets an event
                await asyncio.sleep(0.01)
            await check_open_files(before)
        finally:
            await forks.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_stage_that_cannot_be_started_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_children, "start", failing(start, 1))
    with pytest.raises(Unavailable, match=r"^describe: its process cannot be started: Too many open files"):
        asyncio.run(Children(Limits(1, 1 << 30, 10.0)).run("describe", "/nothing"))
