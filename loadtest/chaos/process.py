"""A real server on a separate repository, which is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loadtest.connection import Target

COMMAND = "from lathe.server.cli.app import app; app(prog_name='lathe')"
LOOK = 0.02  # seconds between two readiness probes
PATIENCE = 120.0  # longest time to become ready, and to stop, in seconds
KEPT = 1_000_000  # LATHE_KEEP_VERSIONS: only clients delete versions
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server. Times of the monotonic clock, in seconds."""

    began: float
    listening: float
    ready: float
    processor: float  # processor seconds until it was ready


class Server:
    """`lathe serve` on loopback, with its output in a log file. `settings` are further environment variables."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._settings = settings or {}
        self.log = folder / "server.log"
        self.repository = folder / "models"
        self.target = Target(f"http://127.0.0.1:{_free_port()}")
        self._process: Process | None = None
        self._lines: BinaryIO | None = None

    @property
    def pid(self) -> int:
        """The process. RuntimeError if it does not run."""
        return self._running().pid

    async def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._lines = self.log.open("ab")
        settings = {"LATHE_KEEP_VERSIONS": str(KEPT), "LATHE_POLL_INTERVAL": "1", **self._settings}
        others = {name: value for name, value in os.environ.items() if not name.startswith("LATHE_")}
        arguments = ["serve", "--model-repo", str(self.repository), "--port", str(self.target.port)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", COMMAND, *arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=self._lines,
            env={**others, **settings},
        )  # fmt: skip

    async def await_ready(self, began: float) -> Start:
        """Wait until the server is ready. RuntimeError if it exits or takes longer than PATIENCE."""
        listening = 0.0
        while time.monotonic() < began + PATIENCE:
            process = self._running()
            with contextlib.suppress(OSError):
                answer = await self.target.ask("GET", "/v2/health/ready")
                listening = listening or time.monotonic()
                if answer.status == 200:
                    return Start(began, listening, time.monotonic(), _processor_seconds(process.pid))
            await asyncio.sleep(LOOK)
        raise RuntimeError(f"the server was not ready within {PATIENCE:g} s: {self._log_tail()}")

    async def kill(self) -> None:
        """Kill the server with SIGKILL. RuntimeError if it has ended by itself."""
        process = self._running()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        self._close_log()

    async def stop(self) -> int | None:
        """Stop the server with SIGTERM and return its exit status; None if it does not end within PATIENCE: kills it.

        RuntimeError if it has ended by itself.
        """
        process, status = self._running(), None
        process.send_signal(signal.SIGTERM)
        try:
            status = await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()
            await process.wait()
        self._close_log()
        return status

    async def end(self) -> None:
        """Kill the server if it runs, and close its log."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._close_log()

    def tracebacks(self) -> int:
        """The number of tracebacks in the server's log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            raise RuntimeError(f"the server ended by itself: {self._log_tail()}")
        return self._process

    def _close_log(self) -> None:
        self._process = None
        if self._lines is not None:
            self._lines.close()

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def _processor_seconds(pid: int) -> float:
    """Processor seconds of a process and its children that have ended (proc(5), fields 14 to 17 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
