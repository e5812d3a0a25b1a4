"""A loaded version that answers requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from server.access.quotas import Quotas
from server.backends.base import LoadedModel, endless, fitting, optional, packing
from server.batching.admission import Admission
from server.batching.batcher import Batcher
from server.batching.cost import CostModel
from server.batching.entry import Entry
from server.batching.execution import run, run_each, run_packed
from server.batching.lookup import Lookup
from server.batching.padding import Padding
from server.batching.policy import BatchPolicy
from server.batching.signature import Group, Signature
from server.errors import ServerError
from server.pipelines.pipeline import BuiltinStage, Pipeline
from server.pipelines.runner import PipelineRunner
from server.scheduling.pool import WorkerPool
from server.settings import Settings
from server.telemetry.statistics import Statistics, StatsBook
from server.types import ModelRef

if TYPE_CHECKING:
    from server.api.codec import Codec
    from server.api.round import Repeats


_LAST = 8.0  # seconds the last executions get where they may have no end
_AGAIN = 0.05  # seconds between two attempts to break them off


class Executor(Protocol):
    """What brings requests to a model: the batcher of one that is compiled, the runner of a pipeline."""

    stats: Statistics
    admission: Admission
    policy: BatchPolicy

    @property
    def cost(self) -> CostModel | None:
        """None: its steps have their own."""
        ...

    def configure(self, policy: BatchPolicy) -> None: ...
    def submit(self, entry: Entry) -> None: ...
    def cancel(self, entry: Entry) -> None: ...
    def turn_away(
        self, group: Group, nbytes: int, deadline: float | None, now: float, client: str
    ) -> ServerError | None: ...
    def expected(self, rows: int) -> float: ...
    async def drained(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Rules:
    """What a model's owner says of its requests now; the arm of a trial shares them with its version."""

    padding: Padding | None = None
    quotas: Quotas | None = None  # of each client, for this model


class Servable:
    """A model in memory with its queue, statistics and signature.

    Made on the event loop once a version is loaded and warm. Whoever resolved it may submit to it; after the registry
    has let it go, :meth:`retire` waits for what it took in before and closes the model.
    """

    def __init__(self, ref: ModelRef, model: LoadedModel, batcher: Executor) -> None:
        self.ref = ref
        self.model = model
        self.batcher = batcher
        self.stats = batcher.stats
        packs = packing(model) is not None
        self.signature = Signature(model.inputs, model.outputs, model.batchable, packs, optional(model), fitting(model))
        self.wire: Codec | None = None  # made by the wire layer on first use
        self.round: Repeats | None = None  # likewise
        self.lookup: Lookup | None = None  # where answers are cached
        self.rules = Rules()
        self._beside: set[asyncio.Task[None]] = set()  # of requests on their way to the queue

    @property
    def is_plain(self) -> bool:
        """Whether all that :meth:`submit` does is to hand requests to the batcher."""
        return self.lookup is None and self.rules.padding is None and self.rules.quotas is None

    def submit(self, entry: Entry) -> None:
        """Queue a request, or answer it soon from the cache; raises Overloaded or DeadlineExceeded at the door.

        BadRequest for inputs of unequal lengths, where they are to be padded. A large request that may be in the cache
        gets such an error as its outcome.
        """
        if self.lookup is not None:
            self.lookup.submit(entry)
        else:
            self._queue(entry)

    def _queue(self, entry: Entry) -> None:
        if self.rules.padding is not None:
            self.rules.padding.apply(entry, self.signature)
        self.batcher.submit(entry)

    def turn_away(self, group: Group, nbytes: int, timeout: float | None, client: str) -> ServerError | None:
        """Refuse a request before it is read, if :meth:`submit` would: counts it and returns why; None: read it."""
        if self.lookup is not None:
            return None
        now = monotonic()
        return self.batcher.turn_away(group, nbytes, None if timeout is None else now + timeout, now, client)

    def cancel(self, entry: Entry) -> None:
        """The request's caller left."""
        self.batcher.cancel(entry)

    def configure(
        self, policy: BatchPolicy, max_items: int | None = None, max_bytes: int | None = None, cache_bytes: int = 0
    ) -> None:
        """Batch, bound the queue and cache as this says from now on; None: as the server's settings say."""
        self.batcher.configure(policy)
        self.batcher.admission.limit(max_items, max_bytes)
        if cache_bytes != (self.lookup.cache.max_bytes if self.lookup is not None else 0):
            self.lookup = Lookup(cache_bytes, self.stats, self._queue, self._beside) if cache_bytes else None

    @property
    def in_flight(self) -> int:
        """Requests queued or running."""
        return self.batcher.admission.items

    async def retire(self, patience: float = _LAST) -> None:
        """Close the model once its last request ended; the registry must no longer hand it out.

        An execution that may have no end gets ``patience`` seconds.
        """
        drained = asyncio.ensure_future(self._drained())
        while (model := endless(self.model)) and not (await asyncio.wait([drained], timeout=patience))[0]:
            model.interrupt()
            patience = _AGAIN
        await drained
        self.batcher.close()
        self.lookup = None  # a connection may remember this for a while yet, see api/lane.py
        await asyncio.to_thread(self.model.close)

    async def _drained(self) -> None:
        while self._beside:
            await asyncio.wait(self._beside)
        await self.batcher.drained()


class ServableFactory:
    """Makes servables that share one worker pool and one book of statistics."""

    def __init__(self, settings: Settings, pool: WorkerPool, book: StatsBook) -> None:
        self._settings = settings
        self._budget = settings.inline_budget_us / 1e6
        self._pool = pool
        self.book = book

    def make(self, ref: ModelRef, model: LoadedModel) -> Servable:
        """Wrap a loaded model; call on the event loop's thread."""
        stats = self.book.of(ref)
        if isinstance(model, Pipeline):
            return Servable(ref, model, PipelineRunner(model, self._own(ref, model), self._admission(), stats))
        execute = run if packing(model) is None else run_packed
        return Servable(ref, model, Batcher(model, self._admission(), self._pool, stats, self._budget, execute))

    def _own(self, ref: ModelRef, pipeline: Pipeline) -> dict[str, Servable]:
        """Return what runs the built-in steps, each with a queue of its own; only the pipeline knows of them."""
        stages = [stage for stage in pipeline.stages if isinstance(stage, BuiltinStage)]
        return {stage.step.name: self._make_stage(ref, stage) for stage in stages}

    def _make_stage(self, pipeline: ModelRef, stage: BuiltinStage) -> Servable:
        ref = ModelRef(f"{pipeline.name}/{stage.step.name}", pipeline.version)
        budget = self._budget if stage.inline else 0.0
        execute = run_each if stage.alone else run
        batcher = Batcher(stage.model, self._admission(), self._pool, Statistics(ref), budget, execute)
        return Servable(ref, stage.model, batcher)

    def _admission(self) -> Admission:
        return Admission(self._settings.queue_items, self._settings.queue_bytes)

    def forget(self, ref: ModelRef) -> None:
        """Drop the statistics of a version that is gone for good."""
        self.book.forget(ref)
