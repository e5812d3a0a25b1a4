"""What answers a pipeline's requests: each goes through the queues of the steps, this only keeps the count."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING

from server.batching.admission import Admission
from server.batching.backlog import Backlog, put_out
from server.batching.entry import Entry, Outcome
from server.batching.execution import Ran
from server.batching.policy import BatchPolicy
from server.batching.signature import Group
from server.errors import DeadlineExceeded, Internal, Overloaded, ServerError
from server.pipelines.definition import StepDef
from server.pipelines.flow import Flow, Target
from server.pipelines.pipeline import ModelStage, Pipeline
from server.telemetry.statistics import Statistics

if TYPE_CHECKING:
    from server.scheduling.servable import Servable


class PipelineRunner:
    """Takes requests in as a batcher does. Used on the event loop's thread only."""

    cost = None

    def __init__(self, model: Pipeline, own: Mapping[str, Servable], admission: Admission, stats: Statistics) -> None:
        """``own``: what runs the steps that are built in, by their names."""
        self.model = model
        self.admission = admission
        self.stats = stats
        self.policy = BatchPolicy()
        self._own = own
        self._steps: list[tuple[StepDef, Target]] = [
            (stage.step, stage.servable if isinstance(stage, ModelStage) else partial(_same, own[stage.step.name]))
            for stage in model.stages
        ]
        self._outputs = [spec.name for spec in model.outputs]
        self._flows: dict[Entry, Flow] = {}
        self._backlog = Backlog()
        self._drained: asyncio.Event | None = None

    def configure(self, policy: BatchPolicy) -> None:
        """Of a pipeline only the latency target counts; its models batch as their own configurations say."""
        self.policy = policy

    def submit(self, entry: Entry) -> None:
        """Begin a request; raises Overloaded, DeadlineExceeded, or what its first steps refuse it for."""
        now = monotonic()
        refusal = self.turn_away(entry.group, entry.nbytes, entry.deadline, now, entry.client)
        if refusal is not None:
            raise refusal
        self._make_room(entry.nbytes)
        self.admission.enter(entry.nbytes)
        self._backlog.add(entry)
        entry.since = now
        entry.pad_here()
        flow = self._flows[entry] = Flow(self._steps, self._outputs, entry, self.stats.stepped, self._ended)
        try:
            flow.start()
        except Exception as error:
            self.stats.refused(error.code if isinstance(error, ServerError) else Internal.code)
            self._leave(entry)
            raise

    def cancel(self, entry: Entry) -> None:
        """The caller left: what waits in any step's queue costs nothing more."""
        flow = self._leave(entry)
        if flow is not None:
            self.stats.cancelled += 1
            flow.stop()
            entry.abandon()

    async def drained(self) -> None:
        """Return once nothing is under way."""
        if self._flows:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()
        for servable in self._own.values():  # what a departed caller's step still runs
            await servable.batcher.drained()

    def close(self) -> None:
        """All is drained and nobody submits any more."""
        for servable in self._own.values():
            servable.batcher.close()

    def expected(self, rows: int) -> float:
        """Return the seconds until a request of so many rows would be answered, behind all that waits at each step."""
        ends: dict[str, float] = {}  # of the tensors
        for step, target in self._steps:
            start = max(ends.get(tensor, 0.0) for tensor in step.inputs.values())
            end = start + target().batcher.expected(rows)
            ends.update(dict.fromkeys(step.outputs.values(), end))
        return max(ends[name] for name in self._outputs if name in ends)

    def turn_away(
        self, group: Group, nbytes: int, deadline: float | None, now: float, client: str
    ) -> ServerError | None:
        """Refuse a request that comes now if it has to be: counts it and returns why; None if it may begin."""
        refusal: ServerError | None = self.admission.refusal(nbytes, now)
        if refusal is None or self._backlog.is_entitled(client, nbytes, self.admission):
            refusal = self._too_slow(group.rows or 1, deadline, now)
        if refusal is not None:
            self.stats.refused(refusal.code)
        return refusal

    def _make_room(self, nbytes: int) -> None:
        """End the newest requests of who has most under way, for one of a client who has less."""
        while not self.admission.has_room(nbytes):
            missing, _ = self.admission.missing(nbytes)
            client = self._backlog.heaviest(by_bytes=missing <= 0)
            victim = next(entry for entry in reversed(self._flows) if entry.client == client)
            self._flows[victim].stop()
            self._leave(victim)
            refusal = put_out(self.admission.retry_after(monotonic()))
            self.stats.refused(refusal.code)
            victim.finish(refusal)

    def _too_slow(self, rows: int, deadline: float | None, now: float) -> ServerError | None:
        target = self.policy.latency_target
        if deadline is None and target is None:
            return None
        expected = self.expected(rows)
        if deadline is not None and now + expected > deadline:
            return DeadlineExceeded(
                "the request's timeout is shorter than the pipeline's steps are expected to take",
                retry_after=self.admission.retry_after(now),
            )
        if target is not None and self._flows and expected > target:
            return Overloaded(
                f"the request would be answered after {expected * 1e3:.0f} ms, the pipeline's latency target is "
                f"{target * 1e3:.0f} ms",
                retry_after=self.admission.retry_after(now),
            )
        return None

    def _ended(self, entry: Entry, outcome: Outcome) -> None:
        self._leave(entry)
        now = monotonic()
        failed = isinstance(outcome, Exception)
        if failed:
            self.stats.failures[outcome.code if isinstance(outcome, ServerError) else Internal.code] += 1
        self.stats.last_inference_ms = int(time() * 1000)
        self.stats.ran(Ran([outcome], entry.rows, 1, entry.since, entry.since, now, now), [0.0], int(failed))
        self.admission.drain.add(1, now)
        entry.finish(outcome)

    def _leave(self, entry: Entry) -> Flow | None:
        flow = self._flows.pop(entry, None)
        if flow is None:
            return None
        self.admission.leave(entry.nbytes)
        self._backlog.remove(entry)
        if self._drained is not None and not self._flows:
            self._drained.set()
            self._drained = None
        return flow


def _same(servable: Servable) -> Servable:
    return servable
