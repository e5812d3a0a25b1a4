"""A chaos run: starts a server and its clients, kills the server repeatedly, and reports."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from loadtest.chaos.checks import PROMISES
from loadtest.chaos.clients import FIRST, HABITS, MODELS, Client, SharedState, repeat_until_over
from loadtest.chaos.history import Operation, read_history, write_history
from loadtest.chaos.process import PATIENCE, Server, Start
from loadtest.output import save, show
from loadtest.scenario import Report
from loadtest.stalls import Wait, longest_wait

SECONDS, EVERY = 600.0, 45.0
AT_START = 0.25  # probability that another kill follows within 4 s of a restart
SHOWN = 5  # violations printed per promise
HISTORY = "chaos.jsonl"
NEEDED = ("start", "upload", "move", "rollback", "infer", "aliases", "audit")  # kinds that every run must have


@dataclass
class Chaos:
    """The state of one run."""

    server: Server
    world: SharedState
    every: float
    starts: list[Start] = field(default_factory=list)
    kills: int = 0

    async def run(self, seconds: float) -> None:
        """Kill and restart the server until the time is over, and once more after the last client has stopped.

        An audit follows each restart. RuntimeError if the server ends by itself or does not become ready.
        """
        await self.start()
        await self.fill()
        clients = [
            asyncio.create_task(repeat_until_over(Client(self.world, f"{name}-{model}-{number}", model), habit))
            for name, habit in HABITS.items()
            for model in MODELS
            for number in range(habit.clients)
        ]
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.wait(clients, timeout=min(left, self.every * self.world.random.uniform(0.8, 1.2)))
            for client in clients:
                if client.done():
                    client.result()  # raises the client's exception
            await self.kill_and_start()
            await self.audit()
        self.world.over = True
        await asyncio.gather(*clients)
        await self.kill_and_start()
        await self.audit()

    async def fill(self) -> None:
        """Upload the first versions of each model, the last of them live."""
        for model in MODELS:
            client = Client(self.world, f"first-{model}", model)
            while len(self.world.versions[model]) < FIRST:
                await client.upload(promoted=True)
            client.leave()

    async def kill_and_start(self) -> None:
        """Kill the server and start it at once; sometimes kill it again within 4 s, which may be before it is ready."""
        await self.kill()
        if self.world.random.random() < AT_START:
            began = time.monotonic()
            await self.server.start()
            await asyncio.sleep(self.world.random.uniform(0.0, 4.0))
            await self.kill()
            self.world.history.append(Operation("start", "server", began, None, "unknown"))
        await self.start()

    async def kill(self) -> None:
        self.kills += 1
        await self.server.kill()

    async def start(self) -> None:
        began = time.monotonic()
        await self.server.start()
        start = await self.server.await_ready(began)
        self.starts.append(start)
        self.world.history.append(Operation("start", "server", start.began, start.ready, "ok"))

    async def audit(self) -> None:
        """Infer with every version of every model (`Client.audit`)."""
        for model in MODELS:
            client = Client(self.world, f"auditor-{model}", model)
            await client.audit()
            client.leave()


@contextmanager
def idle_process() -> Iterator[list[Wait]]:
    """An idle process that wakes every 20 ms. Yields the delays of its wake-ups, which are complete after the block."""
    lates = list[Wait]()
    with subprocess.Popen(
        [sys.executable, "-m", "loadtest.stalls"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield lates
        finally:
            lates += [(at, late) for at, late in json.loads(process.communicate()[0])]


def check_promises(history: Sequence[Operation], report: Report, console: Console) -> None:
    """Add a verdict on every promise to the report, and print the first 5 violations of each.

    Kinds of operation that every run must have are promises, too.
    """
    kinds = Counter(op.kind for op in history)
    for promise, check in PROMISES.items():
        violations = list(check(history))
        for violation in violations[:SHOWN]:
            console.print(f"[red]{promise}[/red]: {violation}", markup=True, highlight=False)
        report.promise(promise, not violations, f"{len(violations)} violations in {len(history):,} operations")
    for needed in NEEDED:
        report.promise(f"{needed} happened", kinds[needed] > 0, f"{kinds[needed]:,}")


def describe(history: Sequence[Operation], report: Report) -> Iterator[str]:
    """A line per kind of operation with its outcomes. Adds the latencies of acknowledged calls to the report."""
    for kind in sorted({op.kind for op in history}):
        found = [op for op in history if op.kind == kind]
        outcomes = Counter(f"{op.outcome} {op.status or ''}".strip() for op in found)
        times = [(op.end - op.invoked) * 1e3 for op in found if op.outcome == "ok" and op.tried in (0.0, op.invoked)]
        if times:
            report.calls_ms[kind] = times
        yield f"{kind}: " + ", ".join(f"{outcome}: {count:,}" for outcome, count in sorted(outcomes.items()))


def describe_starts(starts: Sequence[Start], lates: Sequence[Wait]) -> Iterator[str]:
    """A line per start: its wall time, its processor time, and the longest delay of the idle process."""
    for start in starts:
        late = longest_wait(lates, start.began, start.ready)
        yield (
            f"ready after {start.ready - start.began:.2f} s (listening after {start.listening - start.began:.2f} s, "
            f"{start.processor:.2f} s of a processor; an idle process woke {late * 1e3:.0f} ms late)"
        )
    if starts:
        median = statistics.median(start.ready - start.began for start in starts)
        yield f"ready after {median:.2f} s in the median of {len(starts)} starts"


def parser() -> argparse.ArgumentParser:
    text = "Run random clients on a server that is killed repeatedly. Exit status 1 when a promise is broken."
    made = argparse.ArgumentParser(prog="python -m loadtest chaos", description=text)
    made.add_argument("--seconds", type=float, default=SECONDS, help=f"length of the run (default {SECONDS:g})")
    made.add_argument("--every", type=float, default=EVERY, help=f"mean seconds between kills (default {EVERY:g})")
    made.add_argument("--seed", type=int, default=0, help="seed of the clients' actions (default 0)")
    made.add_argument("--out", type=Path, default=Path("reports"), help="folder for report, history and server's log")
    made.add_argument("--check", type=Path, metavar="FILE", help="check a recorded history and run nothing")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, or check a recorded history; returns the exit status.

    It is 1 if a promise is broken, or if a kind of operation that every run must have is missing; otherwise 0.
    """
    options = parser().parse_args(arguments)
    console = Console(soft_wrap=True)
    report = Report("chaos", {"seconds": options.seconds, "every": options.every, "seed": options.seed})
    if options.check is not None:
        history = read_history(options.check)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        history = _run(options, report, console)
    for line in describe(history, report):
        console.print(line, highlight=False)
    check_promises(history, report, console)
    show(report, console)
    if options.check is None:
        save(report, options.out)
    return 0 if report.held else 1


def _run(options: argparse.Namespace, report: Report, console: Console) -> list[Operation]:
    """Run, and return the history, also of a run that ends early because the server does."""
    status: int | None = None
    failure, lates = "", list[Wait]()
    with tempfile.TemporaryDirectory(prefix="lathe-chaos-") as folder:
        server = Server(Path(folder))
        server.repository.mkdir()
        chaos = Chaos(server, SharedState(server.target, random.Random(options.seed)), options.every)
        try:
            with idle_process() as lates:
                status = asyncio.run(_run_and_stop(chaos, options.seconds))
        except RuntimeError as error:  # the server ended by itself, or did not come back
            failure = str(error)
        finally:
            write_history(options.out / HISTORY, chaos.world.history)
            (options.out / "chaos.log").write_bytes(server.log.read_bytes() if server.log.exists() else b"")
        tracebacks = server.tracebacks()
    for line in describe_starts(chaos.starts, lates):
        console.print(line, highlight=False)
    report.promise("the server's log has no traceback", tracebacks == 0, f"{tracebacks}")
    report.promise(
        "each server becomes ready, and runs until it is killed", not failure, failure or f"{chaos.kills} kills"
    )
    if not failure:
        ended = f"no end within {PATIENCE:g} s of SIGTERM" if status is None else f"exit status {status}"
        report.promise("the last server ends in order", status == 0, f"{ended} after {chaos.kills} kills")
    return chaos.world.history


async def _run_and_stop(chaos: Chaos, seconds: float) -> int | None:
    try:
        await chaos.run(seconds)
        return await chaos.server.stop()
    finally:
        await chaos.server.end()
