"""File descriptors: clients never get the last ones, and the log warns when there are too few."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lathe.server.processes import descriptors
from lathe.server.settings import Settings
from tests.server.fakes import doubler
from tests.server.running import Raw, request, serving

LIMIT = descriptors.RESERVED + 150


@contextmanager
def server(how: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A server with few descriptors; yields it, its port and the number of connections it serves."""
    command = [sys.executable, "-m", "tests.server.api.connection.few_descriptors", str(LIMIT), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port, most = map(int, process.stdout.readline().split())
            yield process, port, most
        finally:
            process.send_signal(signal.SIGKILL)


def stop_server(process: subprocess.Popen[str]) -> str:
    """End a server and return its log."""
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    log = process.stderr.read()
    assert process.wait(30) == 0, log
    return log


@pytest.mark.sample(2)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("how", ["fitted", "unfitted"])
def test_silent_clients_leave_descriptors_for_other_uses(how: str) -> None:
    with server(how) as (process, port, most), ExitStack() as stack:
        assert (most < LIMIT) is (how == "fitted")
        for _ in range(LIMIT - descriptors.RESERVED + 60):
            stack.enter_context(Raw(port))
        for _ in range(5):
            with Raw(port) as good:
                good.send(request("GET", "/v2"))
                assert good.answer().status == 200
        taken = len(os.listdir(f"/proc/{process.pid}/fd"))
        assert taken <= LIMIT - descriptors.RESERVED + 1
        stack.close()
        log = stop_server(process)
    if how == "fitted":
        assert "LATHE_MAX_CONNECTIONS: 8192 connections do not fit into 406 file descriptors" in log
        assert "descriptors run out" not in log
    else:
        assert log.count("file descriptors have run out") == 1, "a line in ten seconds is enough"


def test_the_limit_is_raised_as_far_as_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [100, 5000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.__setitem__(slice(None), wanted))
    assert descriptors.raise_limit() == 5000
    limits[:] = [100, resource.RLIM_INFINITY]
    assert descriptors.raise_limit() == descriptors.MAX_DESCRIPTORS

    def refused(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    limits[:] = [100, 5000]
    monkeypatch.setattr(resource, "setrlimit", refused)
    assert descriptors.raise_limit() == 100


@pytest.mark.parametrize(
    ("allowed", "grpc", "expected"),
    [(20_000, 0, 8192), (20_000, None, 8192), (1024, None, 694), (1024, 0, 315), (100, None, 1)],
)
def test_the_number_of_connections_fits_the_descriptors(
    allowed: int, grpc: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "raise_limit", lambda: allowed)
    monkeypatch.setattr(descriptors, "open_count", lambda: 10)
    assert descriptors.fit_connections(Settings(grpc_port=grpc)).max_connections == expected


def test_a_server_without_descriptors_waits_and_continues() -> None:
    """Simulates that other parts of this process have taken all descriptors, by the kernel's error."""
    with serving({"m": doubler()}) as running:
        (listening,) = running.server.servers[0].sockets
        fails = [OSError(errno.EMFILE, "Too many open files")] * 3

        class Scarce:
            def __getattr__(self, name: str) -> object:
                return getattr(listening, name)

            def fileno(self) -> int:
                return listening.fileno()

            def accept(self) -> object:
                if fails:
                    raise fails.pop()
                return listening.accept()

        listener = running.server.servers[0]
        accept = listener._accept  # type: ignore[attr-defined]
        listener._accept = lambda _: accept(Scarce())  # type: ignore[attr-defined]
        loop = listener.get_loop()
        loop.call_soon_threadsafe(listener._pause, "test")  # type: ignore[attr-defined]
        while fails:
            with running.connect() as raw:
                raw.send(request("GET", "/v2"))
                assert raw.answer().status == 200
