"""Input and output of a scenario: command-line options, traffic, report."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.admin import Admin, difference, random_inputs
from loadtest.arrivals import Times
from loadtest.connection import Target
from loadtest.openloop import Check, OpenLoop
from loadtest.pacing import TICK
from loadtest.stats import Phase, summarise
from loadtest.wire import infer_request

INPUT_SETS = 16  # distinct requests, sent in rotation


@dataclass(frozen=True)
class Options:
    """The command-line options. None leaves the choice to the scenario."""

    url: str = "http://127.0.0.1:8080"
    model: str = "digits"
    rate: float | None = None
    seconds: float | None = None
    connections: int = 64
    rows: int = 1
    onnx: str = "model_repo/digits/2/model.onnx"
    switches: int = 100
    cycles: int = 10
    requests: int = 50_000
    repository: str = ""
    grpc: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of one promise: held or broken, with the measured value."""

    promise: str
    held: bool
    measured: str


@dataclass
class Report:
    """The outcome of one scenario."""

    scenario: str
    options: dict[str, Any]
    phases: list[Phase] = field(default_factory=list)
    calls_ms: dict[str, list[float]] = field(default_factory=dict)  # control-plane calls by kind
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def held(self) -> bool:
        return all(verdict.held for verdict in self.verdicts)

    def promise(self, promise: str, held: bool, measured: str) -> None:
        self.verdicts.append(Verdict(promise, bool(held), measured))

    def promise_no_failures(self) -> None:
        failed = sum(phase.failed for phase in self.phases)
        sent = sum(phase.sent for phase in self.phases)
        self.promise("no request fails", failed == 0, f"{failed} of {sent} failed")


Scenario = Callable[[Options, Report], Coroutine[Any, Any, None]]


@dataclass
class Traffic:
    """Prepared requests for one model, to be sent by any schedule."""

    admin: Admin
    requests: Sequence[bytes]
    connections: int
    tick: float = TICK  # seconds; requests due within one tick are sent together

    @staticmethod
    async def of(options: Options, model: str, timeout_us: int = 0) -> Traffic:
        target = Target(options.url)
        admin = Admin(target, model)
        metadata = await admin.metadata()
        inputs = [random_inputs(metadata, options.rows, seed) for seed in range(INPUT_SETS)]
        requests = [infer_request(target.authority, model, feeds, timeout_us=timeout_us) for feeds in inputs]
        return Traffic(admin, requests, options.connections)

    def loop(self, due: Times, check: Check | None = None) -> OpenLoop:
        return OpenLoop(self.admin.target, self.requests, due, self.connections, check, self.tick)

    async def phase(self, name: str, due: Times, seconds: float) -> Phase:
        """Run one schedule and summarise it, with the batch sizes that the server counted during it."""
        before = await self.admin.batches()
        log = await self.loop(due).run()
        return summarise(name, log, seconds, difference(await self.admin.batches(), before))
