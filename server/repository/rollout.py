"""How versions come, go live, go back and go: every change to what is served passes here.

Slow work (receiving, compiling, loading) is done first and touches nothing that answers requests. Then, under the
model's lock, the change is made durable and shown in one step. Last, what is not needed any more is let go.
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

from server.backends.base import lost
from server.errors import Conflict, Unavailable, UnknownModel, Unsupported
from server.pipelines.definition import BadPipeline, read_definition
from server.pipelines.pipeline import Pipeline
from server.places import PARTY
from server.repository import names, policy
from server.repository.aliases import Aliases
from server.repository.builder import Built
from server.repository.catalog import Catalog, IndexEntry
from server.repository.diskside import DiskSide, Settled, always
from server.repository.housekeeping import Housekeeping
from server.repository.intake import Upload, receive
from server.repository.live import LiveModel, LiveModels
from server.repository.loader import Loader
from server.repository.manifest import Manifest, Signature
from server.repository.names import LIVE
from server.repository.schedules import Schedules
from server.repository.store import Change, Origin, Outcome, Store, now
from server.repository.trials import Trials

log = logging.getLogger(__name__)

_TRIES = 5  # at a rollback whose alias others keep moving
_UNLOADING = 10.0  # seconds an unload call waits at most for requests that were accepted before
_PATIENCE = 4.0  # seconds that work under way gets when the server stops


@dataclass(frozen=True, slots=True)
class Compared:
    """What was live when somebody decided about a version; None: nothing was."""

    live: int | None


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """What an uploader asks for."""

    promote: bool = False
    allow_signature_change: bool = False
    sha256: str | None = None  # expected, hexadecimal
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    withheld: bool = False  # no alias takes it, not even as a model's first version
    compared: Compared | None = None  # what must still be live
    reason: str = ""  # for the audit log
    may_use: Callable[[str], None] = lambda model: None  # raises Forbidden for a model no pipeline of theirs may run

    def fingerprint(self, digest: str) -> str:
        """Return what makes two requests the same."""
        asked = [digest, self.promote, self.allow_signature_change, dict(self.metadata)]
        asked += ["withheld"] if self.withheld else []
        return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What uploaders may do."""

    max_bytes: int
    auto_promote: bool = False  # uploads go live unasked


class LiveMoved(Conflict):
    """Something else is live than what a version was compared with."""


class _Overtaken(Exception):
    """The alias was moved by somebody else since its target was worked out."""


class Rollout:
    """The one who changes what is live. All methods run on the event loop; disk and compiler run beside it."""

    def __init__(
        self, store: Store, models: LiveModels, loader: Loader, housekeeping: Housekeeping, limits: UploadLimits
    ) -> None:
        self._store = store
        self._models = models
        self._loader = loader
        self._housekeeping = housekeeping
        self._disk = DiskSide(store, models, loader, housekeeping)
        self._limits = limits
        self.catalog = Catalog(store, models, self._disk)
        self.trials = Trials(store, models, loader, housekeeping)
        self.schedules = Schedules(models, self.trials)

    # life

    async def open(self) -> None:
        """Finish what a crash left half done; quick. Nothing is in memory yet, and no model known before `load_all`."""
        self._models.registry.is_complete = False
        await asyncio.to_thread(self._store.open)

    async def load_all(self) -> None:
        """Bring every model's wanted versions into memory; what cannot be loaded is noted in the index."""
        try:
            for models in await asyncio.to_thread(self._store.loading_order):
                for error in await asyncio.gather(*(self.sync(model) for model in models), return_exceptions=True):
                    if isinstance(error, Exception):
                        log.error("a model could not be looked at", exc_info=error)
        finally:
            self._models.registry.is_complete = True

    async def stop(self) -> None:
        """Let everything go; requests in flight end first."""
        await self._loader.stop(_PATIENCE)
        for are_pipelines in (True, False):  # these first: what is under way in them still needs the models
            for model in self._models:
                for version, servable in list(model.loaded.items()):
                    if isinstance(servable.model, Pipeline) == are_pipelines:
                        self._loader.let_go(model, version, at_once=True)  # all had the time that a stop takes
            await self._loader.stop(_PATIENCE)
        await asyncio.to_thread(self._store.close)

    # versions

    async def publish(self, name: str, stream: AsyncIterable[bytes], options: PublishOptions) -> Outcome:
        """Take an upload: receive, parse, compile, load, then make it a version (and live, if asked) in one step."""
        model = self._models.changeable(self._models.get(names.check_model(name)))
        PARTY.set(options.origin.party)
        upload = await receive(self._store, stream, self._limits.max_bytes, options.sha256)
        return await self._loader.to_the_end(self._publish(model, upload, options))

    async def delete(self, name: str, version: int, origin: Origin) -> Outcome:
        """Remove a version that no alias names; raises NotFound, Conflict."""
        model = self._models.known(name)
        origin = replace(origin, fingerprint=f"delete {version}")
        return await self._loader.to_the_end(self._housekeeping.delete(model, version, origin))

    async def _publish(self, model: LiveModel, upload: Upload, options: PublishOptions) -> Outcome:
        options = replace(options, origin=replace(options.origin, fingerprint=options.fingerprint(upload.digest)))
        try:
            if (found := await self._replay(model, options.origin)) is not None:
                return found
            await asyncio.to_thread(_check_uses, upload.staging.path, options.may_use)
            built = await self._loader.prepare(model, upload.staging.path, upload.digest)
            outcome = await self._enter(model, upload, options, built)
        finally:
            await asyncio.to_thread(upload.staging.discard)
        self._loader.spawn(self._housekeeping.tidy(model))
        return outcome

    async def _enter(self, model: LiveModel, upload: Upload, options: PublishOptions, built: Built) -> Outcome:
        """Make the version durable and show it; the loaded model is closed if that is refused."""
        signature = Signature.of(built.model.inputs, built.model.outputs)
        manifest = Manifest(upload.staging.entries, now(), signature, options.metadata)
        change = self._arrival(model, built, signature, options)
        entered = False
        try:
            async with model.lock:
                outcome = await asyncio.to_thread(
                    self._store.publish, model.name, upload.staging, manifest, change, options.origin, options.reason
                )
                if not outcome.replayed:
                    entered = await self._loader.enter_or_await(model, outcome.version, built)
                    self._models.keep(model)
                    model.show(outcome.record.state)
                    if model.unloaded and outcome.version in model.loaded:  # meanwhile
                        self._loader.let_go(model, outcome.version)
            return outcome
        finally:
            if not entered:
                await asyncio.to_thread(built.model.close)

    def _arrival(self, model: LiveModel, built: Built, signature: Signature, options: PublishOptions) -> Change:
        pins = built.model.pins if isinstance(built.model, Pipeline) else ()

        def change(state: Aliases) -> Aliases:
            for pin in pins:
                self._store.folder(pin.name, pin.version)  # under the lock: from here on it cannot be deleted
            if options.compared is not None and state.version(LIVE) != options.compared.live:
                raise LiveMoved(f"model {model.name!r}: version {state.version(LIVE)} has gone live meanwhile")
            version, promote = state.high_water, options.promote or self._limits.auto_promote
            specific = model.config.version_policy.specific
            after = state.moved(LIVE, version) if promote else policy.first_goes_live(state, version, specific)
            if options.withheld or after is state:
                return state
            self._check_signature(model, LIVE, state, signature, options.allow_signature_change)
            return after

        return change

    # aliases

    async def set_alias(
        self, name: str, alias: str, version: int, origin: Origin, *, allow_signature_change: bool = False
    ) -> Outcome:
        """Let an alias name a version, loaded first; raises NotFound, Conflict, or why it cannot be loaded."""
        names.check_alias(alias)
        model = self._models.changeable(self._models.known(name))
        origin = replace(origin, fingerprint=f"alias {alias} {version}")
        return await self._loader.to_the_end(self._set_alias(model, alias, version, origin, allow_signature_change))

    async def rollback(self, name: str, alias: str, to: int | None, origin: Origin) -> Outcome:
        """Take an alias one step back along its history, or to a version on it; raises NotFound, Conflict."""
        names.check_alias(alias)
        model = self._models.changeable(self._models.known(name))
        origin = replace(origin, fingerprint=f"rollback {alias} {to}")
        return await self._loader.to_the_end(self._rollback(model, alias, to, origin))

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
        for _ in range(_TRIES):
            target = model.aliases.get(alias).rolled_back(to).version
            with model.pin(target):
                await self._loader.ensure(model, target)
                try:
                    return await self._move(model, "rollback", alias, _back(alias, to, target), origin)
                except _Overtaken:
                    model.show(await asyncio.to_thread(self._store.state, model.name))
        raise Conflict(f"alias {alias!r} of model {model.name!r} is being moved by others: try again")

    async def _move(self, model: LiveModel, action: str, alias: str, change: Change, origin: Origin) -> Outcome:
        async with model.lock:
            outcome = await asyncio.to_thread(self._store.move, model.name, action, alias, change, origin)
            model.show(outcome.record.state)
        self._loader.spawn(self._housekeeping.tidy(model))
        return outcome

    def _check_signature(
        self, model: LiveModel, alias: str, state: Aliases, new: Signature, allow_signature_change: bool
    ) -> None:
        """Raises Conflict when callers of the alias would notice. Runs under the repository's lock, on its thread."""
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

    # the disk's side, and the calls of the inference protocol

    async def renew(self) -> None:
        """Load anew what a fault of a device has put out of use: first all of it goes, then it comes back."""
        found = [
            (model, version, reason)
            for model in self._models
            for version, servable in list(model.loaded.items())
            if (reason := lost(servable.model))
        ]
        for model, version, reason in found:
            log.error("%s:%d is loaded anew: %s", model.name, version, reason)
        leaving = [self._loader.let_go(model, version) for model, version, _ in found]
        await asyncio.gather(*leaving, return_exceptions=True)
        for name in dict.fromkeys(model.name for model, _, _ in found):
            await self.sync(name)

    async def sync(self, name: str, settled: Settled = always) -> None:
        """Bring one model in line with its folder."""
        await self._loader.to_the_end(self._disk.sync(name, settled))

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Look at a model's folder again, take what was copied in, retry what failed; raises why nothing answers."""
        _check_load_parameters(parameters)
        if name not in (known := await asyncio.to_thread(self._store.models)):
            raise UnknownModel.of(name, known)
        model = self._models.get(name)
        model.unloaded = False
        model.failures.clear()
        await self.sync(name)
        if LIVE not in model.answering():
            reasons = iter(model.failures.values())
            raise next(reasons, Unavailable(f"model {name!r} has no version that could be loaded"))

    async def unload(self, name: str) -> None:
        """Let a model go from memory, until a load call; raises NotFound, or Conflict where pipelines need it.

        Returns once its memory is free for others, or after a while if its last requests take longer.
        """
        model = self._models.known(name)
        if users := self._models.pipelines_on(name):
            raise Conflict(f"model {name!r} has versions that are steps of {', '.join(users)}: unload these first")
        model.unloaded = True
        leaving = [self._loader.let_go(model, version) for version in list(model.loaded)]
        model.show(model.aliases)
        if leaving:
            await asyncio.wait(leaving, timeout=_UNLOADING)

    def forgive(self, name: str, versions: Collection[int]) -> None:
        """Let the next sync try versions again that failed: their folders have changed."""
        model = self._models.get(name)
        for version in versions:
            model.failures.pop(version, None)

    def forgive_passing(self) -> list[str]:
        """Let the next sync try again what failed for a reason that may have passed; return the models."""
        forgiven = []
        for model in self._models:
            passing = [version for version, failure in model.failures.items() if failure.http_status >= 500]
            self.forgive(model.name, passing)
            forgiven += [model.name] if passing and not model.unloaded else []
        return forgiven

    def index(self) -> list[IndexEntry]:
        """Return every version with its state."""
        return self.catalog.index()

    # how

    async def _replay(self, model: LiveModel, origin: Origin) -> Outcome | None:
        found = await asyncio.to_thread(self._store.find_key, model.name, origin)
        return Outcome(found, replayed=True) if found else None


def _back(alias: str, to: int | None, target: int) -> Callable[[Aliases], Aliases]:
    def change(state: Aliases) -> Aliases:
        moved = state.rolled_back(alias, to)
        if moved.version(alias) != target:
            raise _Overtaken
        return moved

    return change


def _check_uses(folder: Path, may_use: Callable[[str], None]) -> None:
    """Let nobody reach a model through a pipeline that they could not reach without."""
    with contextlib.suppress(BadPipeline, FileNotFoundError):  # said by who loads it; or it is no pipeline
        for model in sorted(read_definition(folder).models):
            may_use(model)


def _check_load_parameters(parameters: Mapping[str, object]) -> None:
    """What a load call brings along is refused: versions come by upload, where they are checked and kept."""
    for name in parameters:
        if name.startswith("file:") or name == "config":
            raise Unsupported(f"parameter {name[:80]!r} of the load call is not supported: upload a version instead")
