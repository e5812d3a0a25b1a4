"""Admits a pipeline's requests, and tracks them while they pass through the queues of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING

from lathe.server.backends.base import as_tokenizing
from lathe.server.batching.admission import Admission
from lathe.server.batching.backlog import Backlog, displaced
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.execution import BatchResult
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.signature import BatchGroup
from lathe.server.errors import DeadlineExceeded, Internal, Overloaded, ServerError
from lathe.server.pipelines.execution import FlowStep, PipelineRequest, with_step
from lathe.server.pipelines.pipeline import ModelStage, Pipeline, Stage
from lathe.server.telemetry.statistics import Statistics

if TYPE_CHECKING:
    from lathe.server.serving.servable import Servable


class PipelineRunner:
    """Has the interface of a batcher, but starts each request of a pipeline at once; its steps form batches.

    Used on the event loop's thread only.
    """

    cost = None

    def __init__(self, model: Pipeline, own: Mapping[str, Servable], admission: Admission, stats: Statistics) -> None:
        """`own`: the servables of the built-in steps, by step name."""
        self.model = model
        self.admission = admission
        self.stats = stats
        self.policy = BatchPolicy()
        self._own = own
        self._steps = [_flow_step(stage, model.stages, own) for stage in model.stages]
        self._outputs = [spec.name for spec in model.outputs]
        self._flows: dict[Entry, PipelineRequest] = {}
        self._backlog = Backlog()
        self._drained: asyncio.Event | None = None

    def configure(self, policy: BatchPolicy) -> None:
        """Follow a policy. Only its latency target matters: the models batch by their own configurations."""
        self.policy = policy

    def submit(self, entry: Entry) -> None:
        """Start a request; raises Overloaded, DeadlineExceeded, or the errors of its steps.

        May evict a request of another client (see `_evict_for`).
        """
        now = monotonic()
        refusal = self.turn_away(entry.group, entry.nbytes, entry.deadline, now, entry.client, entry.priority)
        if refusal is not None:
            raise refusal
        self._evict_for(entry.nbytes)
        self.admission.enter(entry.nbytes)
        self._backlog.add(entry)
        entry.since = now
        entry.pad_now()
        flow = self._flows[entry] = PipelineRequest(self._steps, self._outputs, entry, self.stats.stepped, self._ended)
        try:
            flow.start()
        except Exception as error:
            self.stats.refused(error.code if isinstance(error, ServerError) else Internal.code)
            self._remove(entry)
            raise

    def cancel(self, entry: Entry) -> None:
        """Cancel a request, and its steps in all queues: the caller left."""
        flow = self._remove(entry)
        if flow is not None:
            self.stats.cancelled += 1
            flow.stop()
            entry.abandon()

    async def drained(self) -> None:
        """Wait until no request is running, in the pipeline and in its built-in steps."""
        if self._flows:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()
        for servable in self._own.values():  # steps of cancelled requests may still run
            await servable.batcher.drained()

    def close(self) -> None:
        """Close the built-in steps' batchers. The caller has awaited `drained` and submits no more requests."""
        for servable in self._own.values():
            servable.batcher.close()

    def expected(self, rows: int, priority: int = 0) -> float:
        """Return the expected seconds until a new request of `rows` rows is answered, with the present queues.

        `priority` is what the request asks for; each model has its own levels.

        Raises the ServerError of a step whose model has no version that can answer, such as Unavailable.
        """
        ends: dict[str, float] = {}  # tensor -> seconds until it exists
        for each in self._steps:
            step = each.step
            start = max(ends.get(tensor, 0.0) for tensor in step.inputs.values())
            try:
                end = start + each.target().batcher.expected(rows, priority=priority)
            except ServerError as error:
                raise with_step(step.name, error) from error
            ends.update(dict.fromkeys(step.outputs.values(), end))
        return max(ends[name] for name in self._outputs if name in ends)

    def turn_away(
        self, group: BatchGroup, nbytes: int, deadline: float | None, now: float, client: str, priority: int = 0
    ) -> ServerError | None:
        """Return the refusal of a request that arrives now, and count it; None if it may start."""
        refusal: ServerError | None = self.admission.refusal(nbytes, now)
        if refusal is None or self._backlog.is_entitled(client, nbytes, self.admission):
            refusal = self._deadline_refusal(group.rows or 1, deadline, now, priority)
        if refusal is not None:
            self.stats.refused(refusal.code)
        return refusal

    def _evict_for(self, nbytes: int) -> None:
        """Evict the newest request of the client with most load until `nbytes` can be admitted (fair share).

        An evicted request ends with an error.
        """
        while not self.admission.has_room(nbytes):
            missing, _ = self.admission.missing(nbytes)
            client = self._backlog.largest_client(by_bytes=missing <= 0)
            victim = next(entry for entry in reversed(self._flows) if entry.client == client)
            self._flows[victim].stop()
            self._remove(victim)
            refusal = displaced(self.admission.retry_after(monotonic()))
            self.stats.refused(refusal.code)
            victim.finish(refusal)

    def _deadline_refusal(self, rows: int, deadline: float | None, now: float, priority: int) -> ServerError | None:
        target = self.policy.latency_target
        if deadline is None and target is None:
            return None
        try:
            expected = self.expected(rows, priority)
        except ServerError as error:  # the model of a step was unloaded, for example
            return error
        if deadline is not None and now + expected > deadline:
            return DeadlineExceeded(
                "the request's timeout is shorter than the expected time of the pipeline's steps",
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
        self._remove(entry)
        now = monotonic()
        failed = isinstance(outcome, Exception)
        if failed:
            self.stats.failures[outcome.code if isinstance(outcome, ServerError) else Internal.code] += 1
        self.stats.last_inference_ms = int(time() * 1000)
        self.stats.ran(BatchResult([outcome], entry.rows, 1, entry.since, entry.since, now, now), [0.0], int(failed))
        self.admission.drain.add(1, now)
        entry.finish(outcome)

    def _remove(self, entry: Entry) -> PipelineRequest | None:
        flow = self._flows.pop(entry, None)
        if flow is None:
            return None
        self.admission.leave(entry.nbytes)
        self._backlog.remove(entry)
        if self._drained is not None and not self._flows:
            self._drained.set()
            self._drained = None
        return flow


def _flow_step(stage: Stage, stages: Sequence[Stage], own: Mapping[str, Servable]) -> FlowStep:
    if isinstance(stage, ModelStage):
        return FlowStep(stage.step, stage.servable)
    servable, tokenizer = own[stage.step.name], as_tokenizing(stage.model)
    if tokenizer is None:
        return FlowStep(stage.step, partial(_constant, servable))
    made = set(stage.step.outputs.values())
    readers = [each for each in stages if not made.isdisjoint(each.step.inputs.values())]
    return FlowStep(stage.step, partial(_constant, servable), tokenizer, partial(_all_pack, readers, own))


def _all_pack(stages: Sequence[Stage], own: Mapping[str, Servable]) -> bool:
    """Whether the versions that run these steps now pack sequences."""
    try:
        found = [each.latest() if isinstance(each, ModelStage) else own[each.step.name] for each in stages]
    except ServerError:
        return False  # the step itself reports it
    return all(servable.signature.ragged for servable in found)


def _constant(servable: Servable) -> Servable:
    return servable
