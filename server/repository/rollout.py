"""Publish, promote, roll back and delete versions: every change to what is served passes here.

Slow work (receiving, compiling, loading) comes first and does not touch the versions that answer requests. Then, under
the model's lock, the change is made durable and becomes visible to requests in one step. Last, versions that are no
longer needed are unloaded or deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from lathe.server.backends.base import lost_reason
from lathe.server.errors import Conflict, Unavailable, UnknownModel, Unsupported
from lathe.server.fair_slots import CLIENT
from lathe.server.pipelines.definition import BadPipeline, read_definition
from lathe.server.pipelines.pipeline import Pipeline
from lathe.server.repository import names, policy
from lathe.server.repository.aliases import Aliases
from lathe.server.repository.builder import BuiltModel
from lathe.server.repository.canary_schedules import CanarySchedules
from lathe.server.repository.catalog import Catalog, IndexEntry
from lathe.server.repository.housekeeping import Housekeeping
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.loader import Loader
from lathe.server.repository.manifest import Manifest, Signature
from lathe.server.repository.names import LIVE_ALIAS
from lathe.server.repository.reconciler import IsSettled, Reconciler, always_settled
from lathe.server.repository.store import Change, Origin, Outcome, Store, now_rfc3339, storage_errors
from lathe.server.repository.trials import Trials
from lathe.server.repository.upload_receiver import Upload, receive_upload

log = logging.getLogger(__name__)

_ROLLBACK_ATTEMPTS = 5  # attempts of a rollback while other callers keep moving the alias
_UNLOAD_TIMEOUT = 10.0  # seconds an unload call waits at most for requests that were accepted before
_STOP_TIMEOUT = 4.0  # seconds that running tasks get when the server stops


@dataclass(frozen=True, slots=True)
class Baseline:
    """A comparison of a new version: `live` is the version that was live at that time, None if no version was."""

    live: int | None


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The options of an upload."""

    promote: bool = False
    allow_signature_change: bool = False
    sha256: str | None = None  # expected, hexadecimal
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    without_alias: bool = False  # no alias moves to it, not even if it is the model's first version
    compared: Baseline | None = None  # the publication is refused if another version is live by now
    reason: str = ""  # for the audit log
    check_may_use: Callable[[str], None] = lambda model: None  # raises Forbidden for a model the caller may not run

    def fingerprint(self, digest: str) -> str:
        """Return a hash of the content's `digest` and the caller's options: equal hashes are the same request.

        The options are `promote`, `allow_signature_change`, `metadata` and `without_alias`.
        """
        parts = [digest, self.promote, self.allow_signature_change, dict(self.metadata)]
        parts += ["withheld"] if self.without_alias else []
        return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """The server's limits for uploads."""

    max_bytes: int
    auto_promote: bool = False  # each upload goes live, with or without `promote`


class LiveVersionChanged(Conflict):
    """The live version has changed since the new version was compared with it."""


class _AliasMoved(Exception):
    """Another caller moved the alias after the rollback's target was computed."""


class Rollout:
    """Publishes, promotes, rolls back and deletes versions.

    Only this class and its parts (trials, reconciler, housekeeping) write aliases. Changes also raise the errors that
    `Store` names. All methods run on the event loop; disk accesses run on threads, compilations in child processes.
    """

    def __init__(
        self, store: Store, models: LiveModels, loader: Loader, housekeeping: Housekeeping, limits: UploadLimits
    ) -> None:
        self._store = store
        self._models = models
        self._loader = loader
        self._housekeeping = housekeeping
        self._disk = Reconciler(store, models, loader, housekeeping)
        self._limits = limits
        self.catalog = Catalog(store, models, self._disk)
        self.trials = Trials(store, models, loader, housekeeping)
        self.schedules = CanarySchedules(models, self.trials)

    # start and stop

    async def open(self) -> None:
        """Recover the repository after a crash; raises as `Store.open`.

        It is quick. Models are known and loaded after `load_all`.
        """
        self._models.registry.is_complete = False
        await asyncio.to_thread(self._store.open)

    async def load_all(self) -> None:
        """Load the versions that each model should have in memory; the index shows which could not be loaded.

        An error of a model's sync is logged, and the other models are loaded.
        """
        try:
            for models in await asyncio.to_thread(self._store.loading_order):
                for error in await asyncio.gather(*(self.sync(model) for model in models), return_exceptions=True):
                    if isinstance(error, Exception):
                        log.error("a model could not be synchronized with its folder", exc_info=error)
        finally:
            self._models.registry.is_complete = True

    async def stop(self) -> None:
        """Unload everything; requests in flight have had the time of the server's drain."""
        await self._loader.stop(_STOP_TIMEOUT)
        for are_pipelines in (True, False):  # pipelines first: their running requests still need the models
            for model in self._models:
                for version, servable in list(model.loaded.items()):
                    if isinstance(servable.model, Pipeline) == are_pipelines:
                        self._loader.let_go(model, version, at_once=True)  # the drain is over
            await self._loader.stop(_STOP_TIMEOUT)
        await asyncio.to_thread(self._store.close)

    # versions

    async def publish(self, name: str, stream: AsyncIterable[bytes], options: PublishOptions) -> Outcome:
        """Receive, parse, compile and load an upload, then make it a version, in one step with its promotion, if any.

        The version goes live if the options or the server's settings ask for that, or if no version is live, but not
        with `without_alias`. An equal upload under an earlier idempotency key returns the earlier outcome. Raises
        BadRequest, TooLarge, Unprocessable, Conflict or another ServerError; then there is no new version.
        """
        model = self._models.check_changeable(self._models.get(names.check_model(name)))
        CLIENT.set(options.origin.party)
        upload = await receive_upload(self._store, stream, self._limits.max_bytes, options.sha256)
        return await self._loader.run_shielded(self._publish(model, upload, options))

    async def delete(self, name: str, version: int, origin: Origin) -> Outcome:
        """Remove a version; raises NotFound, Unavailable while the server starts, or as `Store.delete`."""
        model = self._models.known(name)
        origin = replace(origin, fingerprint=f"delete {version}")
        return await self._loader.run_shielded(self._housekeeping.delete(model, version, origin))

    async def _publish(self, model: LiveModel, upload: Upload, options: PublishOptions) -> Outcome:
        options = replace(options, origin=replace(options.origin, fingerprint=options.fingerprint(upload.digest)))
        try:
            if (found := await self._replay(model, options.origin)) is not None:
                return found
            await asyncio.to_thread(_check_uses, upload.staging.path, options.check_may_use)
            built = await self._loader.prepare(model, upload.staging.path, upload.digest)
            outcome = await self._commit(model, upload, options, built)
        finally:
            await asyncio.to_thread(upload.staging.discard)
        self._loader.spawn(self._housekeeping.tidy(model))
        return outcome

    async def _commit(self, model: LiveModel, upload: Upload, options: PublishOptions, built: BuiltModel) -> Outcome:
        """Make the version durable and visible to requests.

        Closes the loaded model if the version does not use it: the store refused or replayed the change, or a sync
        loaded the version first.
        """
        signature = Signature.of(built.model.inputs, built.model.outputs)
        manifest = Manifest(upload.staging.entries, now_rfc3339(), signature, options.metadata)
        change = self._publish_change(model, built, signature, options)
        entered = False
        try:
            async with model.lock:
                outcome = await asyncio.to_thread(
                    self._store.publish, model.name, upload.staging, manifest, change, options.origin, options.reason
                )
                if not outcome.replayed:
                    entered = await self._loader.add_loaded_or_await(model, outcome.version, built)
                    self._models.keep(model)
                    model.show(outcome.record.state)
                    if model.is_unloaded and outcome.version in model.loaded:  # an unload call came meanwhile
                        self._loader.let_go(model, outcome.version)
            return outcome
        finally:
            if not entered:
                await asyncio.to_thread(built.model.close)

    def _publish_change(
        self, model: LiveModel, built: BuiltModel, signature: Signature, options: PublishOptions
    ) -> Change:
        pins = built.model.pins if isinstance(built.model, Pipeline) else ()

        def change(state: Aliases) -> Aliases:
            for pin in pins:
                self._store.folder(pin.name, pin.version)  # raises NotFound; the lock prevents a delete
            if options.compared is not None and state.version(LIVE_ALIAS) != options.compared.live:
                raise LiveVersionChanged(
                    f"model {model.name!r}: version {state.version(LIVE_ALIAS)} has gone live meanwhile"
                )
            version, promote = state.high_water, options.promote or self._limits.auto_promote
            specific = model.config.version_policy.specific
            after = state.moved(LIVE_ALIAS, version) if promote else policy.with_first_live(state, version, specific)
            if options.without_alias or after is state:
                return state
            self._check_signature(model, LIVE_ALIAS, state, signature, options.allow_signature_change)
            return after

        return change

    # aliases

    async def set_alias(
        self, name: str, alias: str, version: int, origin: Origin, *, allow_signature_change: bool = False
    ) -> Outcome:
        """Load a version and move an alias to it; raises BadRequest, NotFound, Conflict, or the error of loading.

        Conflict if inputs or outputs would change without `allow_signature_change`, or after an unload call.
        """
        names.check_alias(alias)
        model = self._models.check_changeable(self._models.known(name))
        origin = replace(origin, fingerprint=f"alias {alias} {version}")
        return await self._loader.run_shielded(self._set_alias(model, alias, version, origin, allow_signature_change))

    async def rollback(self, name: str, alias: str, to: int | None, origin: Origin) -> Outcome:
        """Move an alias one step back in its history, or to the version `to` in it; loads that version if necessary.

        Raises BadRequest, NotFound, Conflict, or the error of loading.
        """
        names.check_alias(alias)
        model = self._models.check_changeable(self._models.known(name))
        origin = replace(origin, fingerprint=f"rollback {alias} {to}")
        return await self._loader.run_shielded(self._rollback(model, alias, to, origin))

    async def _set_alias(
        self, model: LiveModel, alias: str, version: int, origin: Origin, allow_signature_change: bool
    ) -> Outcome:
        if (found := await self._replay(model, origin)) is not None:
            return found
        with model.pin(version):
            servable = await self._loader.ensure(model, version)
            signature = Signature.of(servable.model.inputs, servable.model.outputs)

            def change(state: Aliases) -> Aliases:
                self._check_signature(model, alias, state, signature, allow_signature_change)
                return state.moved(alias, version)

            return await self._move(model, "alias", alias, change, origin)

    async def _rollback(self, model: LiveModel, alias: str, to: int | None, origin: Origin) -> Outcome:
        if (found := await self._replay(model, origin)) is not None:
            return found
        for _ in range(_ROLLBACK_ATTEMPTS):
            target = model.aliases.get(alias).with_rollback(to).version
            with model.pin(target):
                await self._loader.ensure(model, target)
                try:
                    return await self._move(model, "rollback", alias, _rollback_to(alias, to, target), origin)
                except _AliasMoved:
                    model.show(await asyncio.to_thread(self._store.state, model.name))
        raise Conflict(f"alias {alias!r} of model {model.name!r} is being moved by other callers: try again")

    async def _move(self, model: LiveModel, action: str, alias: str, change: Change, origin: Origin) -> Outcome:
        async with model.lock:
            outcome = await asyncio.to_thread(self._store.move, model.name, action, alias, change, origin)
            model.show(outcome.record.state)
        self._loader.spawn(self._housekeeping.tidy(model))
        return outcome

    def _check_signature(
        self, model: LiveModel, alias: str, state: Aliases, new: Signature, allow_signature_change: bool
    ) -> None:
        """Raise Conflict if the alias's inputs or outputs would change, unless that is allowed or they are not known.

        Runs on a thread, under the store's lock.
        """
        current = state.version(alias)
        if allow_signature_change or current is None:
            return
        manifest = self._disk.manifest(model, current)
        old = model.signature(current) or (manifest.signature if manifest else None)
        if old is not None and old != new:
            raise Conflict(
                f"inputs or outputs differ from those of version {current}, which {alias!r} names: "
                f"{old.describe()} became {new.describe()}; allow_signature_change=true permits it"
            )

    # synchronization with the disk, and the model control calls of the inference protocol

    async def renew(self) -> None:
        """Reload the versions that a device fault made unusable: unload all of them first, then sync their models."""
        found = [
            (model, version, reason)
            for model in self._models
            for version, servable in list(model.loaded.items())
            if (reason := lost_reason(servable.model))
        ]
        for model, version, reason in found:
            log.error("%s:%d is loaded again: %s", model.name, version, reason)
        leaving = [self._loader.let_go(model, version) for model, version, _ in found]
        await asyncio.gather(*leaving, return_exceptions=True)
        for name in dict.fromkeys(model.name for model, _, _ in found):
            await self.sync(name)

    async def sync(self, name: str, settled: IsSettled = always_settled) -> None:
        """Synchronize one model with its folder (see `Reconciler.sync`)."""
        await self._loader.run_shielded(self._disk.sync(name, settled))

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Sync a model with its folder, and retry the versions that failed; undoes `unload`.

        Raises NotFound, the reason why no version answers as live afterwards, Unavailable if the repository cannot be
        read, and Unsupported for `parameters` that hold files or a configuration.
        """
        _check_load_parameters(parameters)
        with storage_errors("loading"):
            if name not in (known := await asyncio.to_thread(self._store.models)):
                raise UnknownModel.of(name, known)
            model = self._models.get(name)
            model.is_unloaded = False
            model.clear_failures(list(model.statuses))
            await self.sync(name)
        if LIVE_ALIAS not in model.answering():
            reasons = iter(model.failures.values())
            raise next(reasons, Unavailable(f"model {name!r} has no version that could be loaded"))

    async def unload(self, name: str) -> None:
        """Unload all versions of a model until `load` is called; raises NotFound.

        Also raises Conflict if pipelines in memory name versions of it by number.
        Returns when the model's memory is free, or after 10 seconds if its last requests take longer.
        """
        model = self._models.known(name)
        if users := self._models.pipelines_using(name):
            raise Conflict(f"model {name!r} has versions that are steps of {', '.join(users)}: unload these first")
        model.is_unloaded = True
        leaving = [self._loader.let_go(model, version) for version in list(model.loaded)]
        model.show(model.aliases)
        if leaving:
            await asyncio.wait(leaving, timeout=_UNLOAD_TIMEOUT)

    def clear_failures(self, name: str, versions: Collection[int]) -> None:
        """Let the next sync retry these versions, because their folders have changed."""
        self._models.get(name).clear_failures(versions)

    def clear_transient_failures(self) -> list[str]:
        """Let the next sync retry the versions that failed with a transient (5xx) error, also when built again.

        Returns the names of their models, without those that a call unloaded.
        """
        forgiven = []
        for model in self._models:
            passing = model.transient_failures
            model.clear_failures(passing)
            forgiven += [model.name] if passing and not model.is_unloaded else []
        return forgiven

    def index(self) -> list[IndexEntry]:
        """Return every version with its state."""
        return self.catalog.index()

    # details

    async def _replay(self, model: LiveModel, origin: Origin) -> Outcome | None:
        return await asyncio.to_thread(self._store.find_key, model.name, origin)


def _rollback_to(alias: str, to: int | None, target: int) -> Callable[[Aliases], Aliases]:
    def change(state: Aliases) -> Aliases:
        moved = state.with_rollback(alias, to)
        if moved.version(alias) != target:
            raise _AliasMoved
        return moved

    return change


def _check_uses(folder: Path, may_use: Callable[[str], None]) -> None:
    """Raise Forbidden if the version is a pipeline that uses a model which the uploader may not run."""
    with contextlib.suppress(BadPipeline, FileNotFoundError):  # no pipeline, or invalid: the loader reports that
        for model in sorted(read_definition(folder).models):
            may_use(model)


def _check_load_parameters(parameters: Mapping[str, object]) -> None:
    """Raise Unsupported for files and configurations in a load call: versions come by upload, which checks them."""
    for name in parameters:
        if name.startswith("file:") or name == "config":
            raise Unsupported(f"parameter {name[:80]!r} of the load call is not supported: upload a version instead")
