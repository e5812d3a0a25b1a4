"""Servables: loaded versions with their queue, statistics and signature."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from lathe.server.access.quotas import Quotas
from lathe.server.backends.base import (
    LoadedModel,
    PatientModel,
    as_endless,
    as_packing,
    optional_inputs,
    shape_predicate,
)
from lathe.server.batching.admission import Admission
from lathe.server.batching.batcher import Batcher
from lathe.server.batching.cache_lookup import CacheLookup
from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.entry import Entry
from lathe.server.batching.execution import Execute, run, run_each, run_packed
from lathe.server.batching.padding import PaddingRule
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.signature import BatchGroup, Signature
from lathe.server.errors import ServerError
from lathe.server.pipelines.pipeline import BuiltinStage, Pipeline
from lathe.server.pipelines.runner import PipelineRunner
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.text_outcome import TextOutcome
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import Statistics, StatsBook
from lathe.server.types import ModelRef

if TYPE_CHECKING:
    from lathe.server.api.codec.codec import Codec
    from lathe.server.api.connection.repeated_requests import RepeatedRequests


_LAST = 8.0  # seconds that the last executions of a closing model get, if they may run for ever
_AGAIN = 0.05  # seconds between two attempts to interrupt them


class Executor(Protocol):
    """Runs requests on a model: the batcher of a compiled model, or the runner of a pipeline."""

    admission: Admission

    @property
    def stats(self) -> Statistics: ...
    @property
    def policy(self) -> BatchPolicy: ...
    @property
    def cost(self) -> CostModel | None:
        """The cost model; None for a pipeline, whose steps have their own."""
        ...

    def configure(self, policy: BatchPolicy) -> None: ...
    def submit(self, entry: Entry) -> None: ...
    def cancel(self, entry: Entry) -> None: ...
    def turn_away(
        self, group: BatchGroup, nbytes: int, deadline: float | None, now: float, client: str, priority: int = 0
    ) -> ServerError | None: ...
    def expected(self, rows: int, *, priority: int = 0) -> float: ...
    async def drained(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Rules:
    """The current request rules of a model's configuration; an arm of a canary shares them with its version."""

    padding: PaddingRule | None = None
    quotas: Quotas | None = None  # rate limits of each client, for this model


class Servable:
    """A model in memory with its queue, statistics and signature.

    Created on the event loop once a version is loaded and warm. Callers that have resolved it may submit requests.
    After the registry has dropped it, `retire` waits for its admitted requests and closes the model.
    """

    def __init__(self, ref: ModelRef, model: LoadedModel, batcher: Executor) -> None:
        self.ref = ref
        self.model = model
        self.batcher = batcher
        self.stats = batcher.stats
        packs = as_packing(model) is not None
        self.signature = Signature(
            model.inputs, model.outputs, model.batchable, packs, optional_inputs(model), shape_predicate(model)
        )
        self.wire: Codec | None = None  # created by `api/codec` at the first request
        self.repeated_requests: RepeatedRequests | None = None  # created by `api/connection` at the first use
        self.lookup: CacheLookup | None = None  # the response cache
        self.rules = Rules()
        self._beside: set[asyncio.Task[None]] = set()  # cache lookups whose requests may still be queued

    @property
    def watches_texts(self) -> bool:
        """Whether `report_text` needs the log-probabilities of texts: only an arm of a canary does."""
        return False

    def report_text(self, outcome: TextOutcome) -> None:
        """Take note of a text that has ended. Only an arm of a canary does."""

    @property
    def is_plain(self) -> bool:
        """Whether `submit` only passes requests to the batcher: no cache, padding or quotas."""
        return self.lookup is None and self.rules.padding is None and self.rules.quotas is None

    def submit(self, entry: Entry) -> None:
        """Queue a request, or answer it from the cache; raises Overloaded or DeadlineExceeded if it is not admitted.

        Raises BadRequest for padded inputs of unequal lengths; a pipeline also raises the errors of its first steps. A
        large request that is looked up in the cache gets such an error as its outcome instead.
        """
        if self.lookup is not None:
            self.lookup.submit(entry)
        else:
            self._queue(entry)

    def _queue(self, entry: Entry) -> None:
        if self.rules.padding is not None:
            self.rules.padding.apply(entry, self.signature)
        self.batcher.submit(entry)

    def turn_away(
        self, group: BatchGroup, nbytes: int, timeout: float | None, client: str, priority: int = 0
    ) -> ServerError | None:
        """Return the error with which `submit` would refuse an unread request, and count it; None: read it.

        `nbytes`: the bytes of its inputs; `timeout` in seconds; `priority`: as the request asks. Always None with a
        response cache.
        """
        if self.lookup is not None:
            return None
        now = monotonic()
        return self.batcher.turn_away(group, nbytes, None if timeout is None else now + timeout, now, client, priority)

    def cancel(self, entry: Entry) -> None:
        """Cancel a request whose client has disconnected."""
        self.batcher.cancel(entry)

    def configure(
        self, policy: BatchPolicy, max_items: int | None = None, max_bytes: int | None = None, cache_bytes: int = 0
    ) -> None:
        """Set the batching policy, the limits of the queue (None: the server's settings) and the bytes of the cache.

        0 bytes: no cache. A cache of another size starts empty.
        """
        self.batcher.configure(policy)
        self.batcher.admission.limit(max_items, max_bytes)
        if cache_bytes != (self.lookup.cache.max_bytes if self.lookup is not None else 0):
            self.lookup = CacheLookup(cache_bytes, self.stats, self._queue, self._beside) if cache_bytes else None

    @property
    def in_flight(self) -> int:
        """The number of requests that are queued or running."""
        return self.batcher.admission.items

    async def retire(self, patience: float | None = None) -> None:
        """Close the model after its last request; the registry must have dropped it before.

        An execution that may run for ever is interrupted after `patience` seconds; None: after those that the kind of
        model gets.
        """
        if patience is None:
            patience = self.model.last_seconds if isinstance(self.model, PatientModel) else _LAST
        drained = asyncio.ensure_future(self._drained())
        while (model := as_endless(self.model)) and not (await asyncio.wait([drained], timeout=patience))[0]:
            model.interrupt()
            patience = _AGAIN
        await drained
        self.batcher.close()
        self.lookup = None  # frees the cache: connections may refer to this object for longer (request_template.py)
        await asyncio.to_thread(self.model.close)

    async def _drained(self) -> None:
        while self._beside:
            await asyncio.wait(self._beside)
        await self.batcher.drained()


class ServableFactory:
    """Creates servables that share one worker pool and one book of statistics."""

    def __init__(self, settings: Settings, pool: WorkerPool, book: StatsBook) -> None:
        self._settings = settings
        self._budget = settings.inline_budget_us / 1e6
        self._pool = pool
        self.book = book

    def make(self, ref: ModelRef, model: LoadedModel) -> Servable:
        """Return a servable for a loaded model; must be called on the event loop's thread."""
        stats = self.book.of(ref)
        if isinstance(model, Pipeline):
            return Servable(
                ref, model, PipelineRunner(model, self._builtin_steps(ref, model), self._admission(), stats)
            )
        execute = _execute_of(model)
        return Servable(ref, model, Batcher(model, self._admission(), self._pool, stats, self._budget, execute))

    def _builtin_steps(self, ref: ModelRef, pipeline: Pipeline) -> dict[str, Servable]:
        """Return a servable, with its own queue, for each built-in step; they are not in the registry."""
        stages = [stage for stage in pipeline.stages if isinstance(stage, BuiltinStage)]
        return {stage.step.name: self._make_stage(ref, stage) for stage in stages}

    def _make_stage(self, pipeline: ModelRef, stage: BuiltinStage) -> Servable:
        ref = ModelRef(f"{pipeline.name}/{stage.step.name}", pipeline.version)
        budget = self._budget if stage.inline else 0.0
        execute = run_each if stage.alone else _execute_of(stage.model)
        batcher = Batcher(stage.model, self._admission(), self._pool, Statistics(ref), budget, execute)
        return Servable(ref, stage.model, batcher)

    def _admission(self) -> Admission:
        return Admission(self._settings.queue_items, self._settings.queue_bytes)

    def forget(self, ref: ModelRef) -> None:
        """Drop the statistics of a deleted version."""
        self.book.forget(ref)


def _execute_of(model: LoadedModel) -> Execute:
    """How requests of a batch run: packed if the model packs, otherwise stacked."""
    return run if as_packing(model) is None else run_packed
