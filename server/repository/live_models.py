"""The models of this process: which versions are in memory, the state of each, and the view that requests see."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

from lathe.server.access.quotas import Quotas
from lathe.server.backends.base import LoadedModel, PackingModel, as_packing
from lathe.server.canary.guard import Verdict
from lathe.server.canary.plan import CanaryPlan
from lathe.server.canary.traffic import Trial
from lathe.server.errors import Conflict, ServerError
from lathe.server.pipelines.pipeline import Pipeline
from lathe.server.repository import policy
from lathe.server.repository.aliases import Aliases
from lathe.server.repository.lifecycle import State, Status
from lathe.server.repository.manifest import Manifest, Signature
from lathe.server.repository.model_config import CONFIG, Compilation, Generation, ModelConfig
from lathe.server.repository.names import LIVE_ALIAS
from lathe.server.repository.registry import ModelView, Registry
from lathe.server.telemetry.logs import log_fields

if TYPE_CHECKING:
    from lathe.server.serving.servable import Servable

log = logging.getLogger(__name__)
OnVerdict = Callable[["LiveModel", CanaryPlan, Verdict, str], None]
# What a version was built with, and whether dimension 0 may be the batch.
BuildConfig: TypeAlias = tuple[tuple[Compilation, Generation], bool]


@dataclass(slots=True, weakref_slot=True, eq=False)
class LiveModel:
    """One model in this process: aliases, versions in memory, state of each version, configuration, running trial.

    Only the event loop's thread changes it; `lock` is held from a durable change until it is visible.
    """

    name: str
    registry: Registry
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    aliases: Aliases = field(default_factory=Aliases)  # as requests see them
    loaded: dict[int, Servable] = field(default_factory=dict)
    statuses: dict[int, Status] = field(default_factory=dict)  # of every version on disk
    failures: dict[int, ServerError] = field(default_factory=dict)
    built_with: dict[int, BuildConfig] = field(default_factory=dict)  # of each version in memory
    rebuild_failures: dict[int, ServerError] = field(default_factory=dict)  # of versions in memory: the old build stays
    loading: dict[int, asyncio.Task[Servable]] = field(default_factory=dict)
    pinned: Counter[int] = field(default_factory=Counter)  # pins of each version, by operations and pipelines
    unadopted_manifests: dict[int, Manifest] = field(default_factory=dict)  # of hand-copied versions, not on disk (yet)
    unadopted: set[int] = field(default_factory=set)  # hand-copied folders that are not adopted yet
    config: ModelConfig = field(default_factory=ModelConfig)
    config_error: str = ""  # why the model's config.toml is not applied; the previous configuration stays
    quotas: Quotas | None = None  # rate limits per client, over all versions
    is_unloaded: bool = False  # by an unload call, until a load call
    trial: Trial | None = None  # of a canary, while both versions are in memory
    decided: OnVerdict | None = None  # called with the verdict of a trial

    @property
    def loadable_versions(self) -> set[int]:
        """The versions that can be loaded: adopted, and not failed."""
        return self.statuses.keys() - self.unadopted - self.failures.keys()

    @property
    def chosen(self) -> list[int]:
        """The versions that the configuration wants in memory, whatever the aliases are."""
        return self.config.version_policy.chosen(self.loadable_versions)

    @property
    def outdated_versions(self) -> list[int]:
        """The versions in memory that were built with other settings than the present configuration's."""
        wanted = self.config.build, self.config.batches
        return [version for version in self.loaded if self.built_with[version] != wanted]

    @property
    def transient_failures(self) -> list[int]:
        """The versions that could not be loaded, or built again, because of a transient (5xx) error."""
        failures = [*self.failures.items(), *self.rebuild_failures.items()]
        return [version for version, failure in failures if failure.http_status >= 500]

    def clear_failures(self, versions: Iterable[int]) -> None:
        """Let the next sync retry these versions."""
        for version in versions:
            self.failures.pop(version, None)
            self.rebuild_failures.pop(version, None)

    def status(self, version: int) -> Status:
        """Return the status of a version; the initial one for an unknown version."""
        return self.statuses.get(version, Status())

    def advance(self, version: int, state: State, reason: str = "") -> None:
        """Set the next state of a version; raises IllegalTransition."""
        self.statuses[version] = self.status(version).to(state, reason)

    def fail(self, version: int, error: ServerError) -> None:
        """Set a version's state to FAILED, and record why it cannot be loaded."""
        self.failures[version] = error
        if self.status(version).state not in (State.COMPILING, State.LOADING):
            self.advance(version, State.COMPILING)
        self.advance(version, State.FAILED, error.message)

    def signature(self, version: int) -> Signature | None:
        """Return the inputs and outputs of a version, None if it is not in memory."""
        servable = self.loaded.get(version)
        return Signature.of(servable.model.inputs, servable.model.outputs) if servable else None

    def configure(self, config: ModelConfig) -> None:
        """Apply a configuration to the model and its loaded versions.

        Compiler options and `max_batch_size = 0` take effect at a rebuild (`Loader.rebuild`).
        """
        quota = config.client_quota.quota
        if quota != (self.quotas.quota if self.quotas else None):
            self.quotas = Quotas(quota) if quota else None
        if config != self.config:
            self.rebuild_failures.clear()
        self.config, self.config_error = config, ""
        for servable in self.loaded.values():
            self.apply_config(servable)

    def apply_config(self, servable: Servable) -> None:
        """Apply the configuration to a version; `config_error` names the fields that this version cannot follow."""
        queue, cache = self.config.queue, self.config.response_cache.max_bytes
        servable.configure(self.config.policy, queue.max_queue_size, queue.max_queue_bytes, cache)
        padding = self.config.padding.rule if as_packing(servable.model) is None else None
        problems: dict[str, str] = {}  # by field
        if (rows := self.config.max_batch_size or 1) > 1 and not servable.model.batchable:
            problems["max_batch_size"] = _not_batchable(servable.model, rows)
        elif rows > servable.model.max_batch:
            problems["max_batch_size"] = _batch_too_large(servable.model, rows)
        if self.config.compile.packing and (reason := _not_packable(servable.model)):
            problems["compile.packing"] = reason
        if padding is not None and (problem := padding.mismatch(servable.signature)):
            problems["padding"] = problem
            padding = None
        if unknown := self.config.label_filename.keys() - servable.signature.outputs.keys():
            expected = sorted(servable.signature.outputs)
            problems["label_filename"] = f"expected names of outputs, some of {expected}, got {sorted(unknown)}"
        if problems:
            messages = (f"{at}: version {servable.ref.version}: {problem}" for at, problem in problems.items())
            self.config_error = f"{CONFIG}: {'; '.join(messages)}"
        servable.rules.padding, servable.rules.quotas = padding, self.quotas
        servable.signature.labels = self.config.labels

    @contextmanager
    def pin(self, version: int) -> Iterator[None]:
        """A context manager inside which a version is not unloaded as unneeded, nor deleted by retention."""
        self.pinned[version] += 1
        try:
            yield
        finally:
            self.pinned[version] -= 1

    def show(self, aliases: Aliases) -> None:
        """Publish a new view to requests: the loaded versions, and `aliases` unless a newer generation is visible."""
        before = self._visible_routes().get(LIVE_ALIAS)
        if aliases.generation >= self.aliases.generation:
            self.aliases = aliases
        self.trial = self._current_trial()
        self.registry.put(self.name, ModelView(self._routes(), dict(self.loaded), self._absence_reasons(), self.trial))
        self._log_live_change(before)

    def answering(self) -> dict[str, int]:
        """Return by alias the version that answers for it (`policy.answering_version`), without unanswered aliases."""
        visible, loadable = self._visible_routes(), self.loadable_versions
        found = {
            a: policy.answering_version(self.aliases, a, self.loaded, visible.get(a), loadable)
            for a in self.aliases.aliases
        }
        return {alias: version for alias, version in found.items() if version is not None}

    def _log_live_change(self, before: int | None) -> None:
        """Log that another version answers requests without a version now, or that none does."""
        now = self._visible_routes().get(LIVE_ALIAS)
        if now == before:
            return
        if now is None:
            log.info("%s: no version answers any more", self.name, extra=log_fields(model=self.name, version=before))
        else:
            instead = f", version {before} was" if before is not None else ""
            log.info(
                "%s: version %d is live%s", self.name, now, instead, extra=log_fields(model=self.name, version=now)
            )

    def _current_trial(self) -> Trial | None:
        """Return the trial of the canary plan: the running one, or a new one for another trial or changed versions.

        None without a plan, before its start, and if the trial cannot run (`can_run_trial`).
        """
        plan, live = self.aliases.canary, self.answering().get(LIVE_ALIAS)
        if plan is None or live is None or not plan.begun or not self.can_run_trial(plan):
            return None
        stable, candidate = self.loaded[live], self.loaded[plan.version]
        trial = self.trial
        if (
            trial is not None
            and plan.is_same_trial(trial.plan)
            and (trial.stable, trial.candidate) == (stable, candidate)
        ):
            trial.follow(plan)
            return trial
        return Trial(plan, stable, candidate, self._report_verdict)

    def can_run_trial(self, plan: CanaryPlan) -> bool:
        """Whether the version that answers as live and the candidate are loaded, differ, and have equal signatures."""
        live = self.answering().get(LIVE_ALIAS)
        if live is None or live == plan.version or plan.version not in self.loaded:
            return False
        return self.signature(live) == self.signature(plan.version)

    def _report_verdict(self, plan: CanaryPlan, verdict: Verdict, reason: str) -> None:
        if self.decided is not None:
            self.decided(self, plan, verdict, reason)

    def _visible_routes(self) -> dict[str, int]:
        view = self.registry.find(self.name)
        return {key: servable.ref.version for key, servable in view.routes.items()} if view else {}

    def _routes(self) -> dict[str, Servable]:
        routes = {str(version): servable for version, servable in self.loaded.items()}
        for alias, version in self.answering().items():
            routes[alias] = self.loaded[version]
        if LIVE_ALIAS in routes:
            routes[""] = routes[LIVE_ALIAS]
        return routes

    def _absence_reasons(self) -> dict[str, str]:
        reasons = {
            str(version): self._absence_reason(version) for version in self.statuses if version not in self.loaded
        }
        for name, alias in self.aliases.aliases.items():
            reasons[name] = self._absence_reason(alias.version)
        reasons[""] = reasons.get(LIVE_ALIAS, "no version is live")
        return reasons

    def _absence_reason(self, version: int) -> str:
        if self.is_unloaded:
            return "it was unloaded"
        status = self.status(version)
        return f"version {version} is {status.state.value}" + (f": {status.reason}" if status.reason else "")


class LiveModels:
    """All models of this process. A model without versions exists only while its first upload is running."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.decided: OnVerdict | None = None  # set by `Trials`
        self._models: dict[str, LiveModel] = {}
        self._without_versions: WeakValueDictionary[str, LiveModel] = WeakValueDictionary()

    def __iter__(self) -> Iterator[LiveModel]:
        return iter([self._models[name] for name in sorted(self._models)])

    def get(self, name: str) -> LiveModel:
        """Return a model; makes a new one if there is none of this name."""
        found = self._models.get(name) or self._without_versions.get(name)
        if found is None:
            found = self._without_versions[name] = LiveModel(name, self.registry, decided=self._report_verdict)
        return found

    def known(self, name: str) -> LiveModel:
        """Return a model that has versions; raises NotFound for another name.

        While the server starts, it raises Unavailable instead, since the model may still be loaded.
        """
        if name not in self._models:
            raise self.registry.unknown(name)
        return self._models[name]

    def pipelines_using(self, name: str) -> list[str]:
        """Return the pipelines in memory, as `name:version`, that pin versions of a model."""
        servables = [servable for model in self for servable in model.loaded.values()]
        pipelines = ((servable.ref, servable.model) for servable in servables if isinstance(servable.model, Pipeline))
        return [str(ref) for ref, pipeline in pipelines if name in {pin.name for pin in pipeline.pins}]

    def check_changeable(self, model: LiveModel) -> LiveModel:
        """Return the model; raises Conflict if it was unloaded by a call."""
        if model.is_unloaded:
            raise Conflict(f"model {model.name!r} was unloaded here: load it first")
        return model

    def keep(self, model: LiveModel) -> None:
        """Add a model to the known ones: it has a version now."""
        self._models[model.name] = model

    def _report_verdict(self, model: LiveModel, plan: CanaryPlan, verdict: Verdict, reason: str) -> None:
        if self.decided is not None:
            self.decided(model, plan, verdict, reason)

    def forget(self, model: LiveModel) -> None:
        """Remove a model whose folder is gone."""
        self._models.pop(model.name, None)
        self.registry.remove(model.name)


def _not_batchable(model: LoadedModel, rows: int) -> str:
    """The message for a `max_batch_size` above 1 where each request must run alone."""
    return f"expected 1, or a model whose requests may share a batch, got {rows}: {model.batch_reason}"


def _batch_too_large(model: LoadedModel, rows: int) -> str:
    """The message for a `max_batch_size` above the batch that the model is compiled for."""
    return f"expected at most {model.max_batch}, which it is compiled for, or a larger compile.max_batch, got {rows}"


def _not_packable(model: LoadedModel) -> str:
    """Why a `PackingModel` does not pack; empty if it does, and for other models."""
    return model.packing_reason if isinstance(model, PackingModel) and not model.packs else ""
