"""One model in this process: what is in memory, in which state each version is, and what requests see of it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from server.access.quotas import Quotas
from server.backends.base import LoadedModel, PackingModel, packing
from server.canary.guard import Verdict
from server.canary.plan import CanaryPlan
from server.canary.traffic import Trial
from server.errors import Conflict, ServerError
from server.pipelines.pipeline import Pipeline
from server.repository import policy
from server.repository.aliases import Aliases
from server.repository.lifecycle import State, Status
from server.repository.manifest import Manifest, Signature
from server.repository.modelconfig import CONFIG, ModelConfig
from server.repository.names import LIVE
from server.repository.registry import Registry, View
from server.telemetry.logs import about

if TYPE_CHECKING:
    from server.scheduling.servable import Servable

log = logging.getLogger(__name__)
TrialDecided = Callable[["LiveModel", CanaryPlan, Verdict, str], None]


@dataclass(slots=True, weakref_slot=True, eq=False)
class LiveModel:
    """Changed on the event loop's thread only. ``lock`` is held over a durable change and its showing."""

    name: str
    registry: Registry
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    aliases: Aliases = field(default_factory=Aliases)  # as last shown
    loaded: dict[int, Servable] = field(default_factory=dict)
    statuses: dict[int, Status] = field(default_factory=dict)  # of every version on disk
    failures: dict[int, ServerError] = field(default_factory=dict)
    loading: dict[int, asyncio.Task[Servable]] = field(default_factory=dict)
    pinned: Counter[int] = field(default_factory=Counter)  # versions an operation under way needs in memory
    guests: dict[int, Manifest] = field(default_factory=dict)  # taken from a repository that cannot be written
    untaken: set[int] = field(default_factory=set)  # hand-copied folders the repository has not taken note of
    config: ModelConfig = field(default_factory=ModelConfig)
    config_error: str = ""  # why the file beside the model is not followed; the configuration before it is
    quotas: Quotas | None = None  # of each client, over all versions
    unloaded: bool = False  # by request, until a load request
    trial: Trial | None = None  # of a candidate, while both versions are in memory
    decided: TrialDecided | None = None  # told when a trial comes to a verdict

    @property
    def candidates(self) -> set[int]:
        """The versions that may be brought into memory."""
        return self.statuses.keys() - self.untaken - self.failures.keys()

    @property
    def chosen(self) -> list[int]:
        """The versions its owner wants in memory whatever aliases say."""
        return self.config.version_policy.chosen(self.candidates)

    def status(self, version: int) -> Status:
        """Return the state of a version on disk."""
        return self.statuses.get(version, Status())

    def advance(self, version: int, state: State, reason: str = "") -> None:
        """Note the next state of a version."""
        self.statuses[version] = self.status(version).to(state, reason)

    def fail(self, version: int, error: ServerError) -> None:
        """Note why a version cannot be brought into memory."""
        self.failures[version] = error
        if self.status(version).state not in (State.COMPILING, State.LOADING):
            self.advance(version, State.COMPILING)
        self.advance(version, State.FAILED, error.message)

    def signature(self, version: int) -> Signature | None:
        """Return what a version in memory takes and gives."""
        servable = self.loaded.get(version)
        return Signature.of(servable.model.inputs, servable.model.outputs) if servable else None

    def configure(self, config: ModelConfig) -> None:
        """Follow a configuration from now on."""
        quota = config.client_quota.quota
        if quota != (self.quotas.quota if self.quotas else None):
            self.quotas = Quotas(quota) if quota else None
        self.config, self.config_error = config, ""
        for servable in self.loaded.values():
            self.adjust(servable)

    def adjust(self, servable: Servable) -> None:
        """Let a version follow the configuration."""
        queue, cache = self.config.queue, self.config.response_cache.max_bytes
        servable.configure(self.config.policy, queue.max_queue_size, queue.max_queue_bytes, cache)
        padding = self.config.padding.rule if packing(servable.model) is None else None
        problems: dict[str, str] = {}  # by field
        if (rows := self.config.max_batch_size or 1) > 1 and not servable.model.batchable:
            problems["max_batch_size"] = _not_batched(servable.model, rows)
        elif rows > servable.model.max_batch:
            problems["max_batch_size"] = _compiled_for_less(servable.model, rows)
        if self.config.compile.packing and (reason := _not_packed(servable.model)):
            problems["compile.packing"] = reason
        if padding is not None and (problem := padding.problem(servable.signature)):
            problems["padding"] = problem
            padding = None
        if unknown := self.config.label_filename.keys() - servable.signature.outputs.keys():
            expected = sorted(servable.signature.outputs)
            problems["label_filename"] = f"expected names of outputs, some of {expected}, got {sorted(unknown)}"
        if problems:
            told = (f"{at}: version {servable.ref.version}: {problem}" for at, problem in problems.items())
            self.config_error = f"{CONFIG}: {'; '.join(told)}"
        servable.rules.padding, servable.rules.quotas = padding, self.quotas
        servable.signature.labels = self.config.labels

    @contextmanager
    def pin(self, version: int) -> Iterator[None]:
        """Keep a version in memory meanwhile."""
        self.pinned[version] += 1
        try:
            yield
        finally:
            self.pinned[version] -= 1

    def show(self, aliases: Aliases) -> None:
        """Let requests see these aliases, unless newer ones are shown already, and what is loaded now."""
        before = self._shown().get(LIVE)
        if aliases.generation >= self.aliases.generation:
            self.aliases = aliases
        self.trial = self._current_trial()
        self.registry.put(self.name, View(self._routes(), dict(self.loaded), self._absent(), self.trial))
        self._tell_of_live(before)

    def answering(self) -> dict[str, int]:
        """Return the version that answers for each alias."""
        shown, coming = self._shown(), self.candidates
        found = {a: policy.answering(self.aliases, a, self.loaded, shown.get(a), coming) for a in self.aliases.aliases}
        return {alias: version for alias, version in found.items() if version is not None}

    def _tell_of_live(self, before: int | None) -> None:
        """Log that another version answers what names none, or that none does any more."""
        now = self._shown().get(LIVE)
        if now == before:
            return
        if now is None:
            log.info("%s: no version answers any more", self.name, extra=about(model=self.name, version=before))
        else:
            instead = f", version {before} was" if before is not None else ""
            log.info("%s: version %d is live%s", self.name, now, instead, extra=about(model=self.name, version=now))

    def _current_trial(self) -> Trial | None:
        """Return the trial that the aliases ask for: the one under way, unless one of its versions is another now."""
        plan, live = self.aliases.canary, self.answering().get(LIVE)
        if plan is None or live is None or not plan.begun or not self.can_try(plan):
            return None
        stable, candidate = self.loaded[live], self.loaded[plan.version]
        trial = self.trial
        if trial is not None and plan.is_trial(trial.plan) and (trial.stable, trial.candidate) == (stable, candidate):
            trial.follow(plan)
            return trial
        return Trial(plan, stable, candidate, self._tell)

    def can_try(self, plan: CanaryPlan) -> bool:
        """Whether both versions of a trial are in memory, and no older one stands in for the live one."""
        live = self.answering().get(LIVE)
        if live is None or live == plan.version or plan.version not in self.loaded:
            return False
        return self.signature(live) == self.signature(plan.version)

    def _tell(self, plan: CanaryPlan, verdict: Verdict, reason: str) -> None:
        if self.decided is not None:
            self.decided(self, plan, verdict, reason)

    def _shown(self) -> dict[str, int]:
        view = self.registry.find(self.name)
        return {key: servable.ref.version for key, servable in view.routes.items()} if view else {}

    def _routes(self) -> dict[str, Servable]:
        routes = {str(version): servable for version, servable in self.loaded.items()}
        for alias, version in self.answering().items():
            routes[alias] = self.loaded[version]
        if LIVE in routes:
            routes[""] = routes[LIVE]
        return routes

    def _absent(self) -> dict[str, str]:
        absent = {str(version): self._excuse(version) for version in self.statuses if version not in self.loaded}
        for name, alias in self.aliases.aliases.items():
            absent[name] = self._excuse(alias.version)
        absent[""] = absent.get(LIVE, "no version is live")
        return absent

    def _excuse(self, version: int) -> str:
        if self.unloaded:
            return "it was unloaded"
        status = self.status(version)
        return f"version {version} is {status.state.value}" + (f": {status.reason}" if status.reason else "")


class LiveModels:
    """All models of this process. One that has no version yet is kept only while somebody works on its first."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.decided: TrialDecided | None = None  # set by who acts on verdicts
        self._models: dict[str, LiveModel] = {}
        self._coming: WeakValueDictionary[str, LiveModel] = WeakValueDictionary()

    def __iter__(self) -> Iterator[LiveModel]:
        return iter([self._models[name] for name in sorted(self._models)])

    def get(self, name: str) -> LiveModel:
        """Return a model, new if need be."""
        found = self._models.get(name) or self._coming.get(name)
        if found is None:
            found = self._coming[name] = LiveModel(name, self.registry, decided=self._tell)
        return found

    def known(self, name: str) -> LiveModel:
        """Return a model that has versions; raises NotFound, while the server starts Unavailable."""
        if name not in self._models:
            raise self.registry.unknown(name)
        return self._models[name]

    def pipelines_on(self, name: str) -> list[str]:
        """Return the pipelines in memory that hold versions of a model."""
        servables = [servable for model in self for servable in model.loaded.values()]
        pipelines = ((servable.ref, servable.model) for servable in servables if isinstance(servable.model, Pipeline))
        return [str(ref) for ref, pipeline in pipelines if name in {pin.name for pin in pipeline.pins}]

    def changeable(self, model: LiveModel) -> LiveModel:
        """Return the model if what it serves may change; raises Conflict."""
        if model.unloaded:
            raise Conflict(f"model {model.name!r} was unloaded here: load it first")
        return model

    def keep(self, model: LiveModel) -> None:
        """Count a model among the known ones: it has a version now."""
        self._models[model.name] = model

    def _tell(self, model: LiveModel, plan: CanaryPlan, verdict: Verdict, reason: str) -> None:
        if self.decided is not None:
            self.decided(model, plan, verdict, reason)

    def forget(self, model: LiveModel) -> None:
        """Drop a model whose folder is gone."""
        self._models.pop(model.name, None)
        self.registry.remove(model.name)


def _not_batched(model: LoadedModel, rows: int) -> str:
    """Why a model runs every request alone where its owner wants batches."""
    return f"expected 1, or a model whose requests may share a batch, got {rows}: {model.batch_reason}"


def _compiled_for_less(model: LoadedModel, rows: int) -> str:
    """Why batches stay smaller than their owner wants them."""
    return f"expected at most {model.max_batch}, which it is compiled for, or a larger compile.max_batch, got {rows}"


def _not_packed(model: LoadedModel) -> str:
    """Why a model that was compiled to pack does not; empty where it does."""
    return model.packing_reason if isinstance(model, PackingModel) and not model.packs else ""
