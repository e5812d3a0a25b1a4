"""The model repository on disk: versions that never change, aliases that move, and a log of every change.

    <root>/<model>/<version>/{manifest.json, model.onnx, ...}
    <root>/<model>/aliases.json                the version of each alias; derived from the log, readable by anybody
    <root>/.lathe/{lock, log/<model>.log, staging/, trash/}

A change is a write-ahead log entry. It has three steps, under one lock that all processes of the repository share: the
files are made durable; the record is appended to the model's log and synced, which commits the change; the record is
applied (folder renamed, `aliases.json` replaced). Each process that takes the lock first applies the model's last
record if a crash prevented that. Version, alias move, audit entry and idempotency key are one record, so a crash leaves
all or none.
"""

from __future__ import annotations

import datetime
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from lathe.core.exit_status import is_out_of_space
from lathe.core.files import open_plain
from lathe.server.errors import Conflict, NotFound, ServerError, StorageFull, Unavailable, Unprocessable
from lathe.server.pipelines.definition import BadPipeline, Definition, read_definition
from lathe.server.repository import names
from lathe.server.repository.aliases import Aliases, DamagedDocument
from lathe.server.repository.disk_space import DiskSpace
from lathe.server.repository.file_lock import FileLock
from lathe.server.repository.fs import Fs, make_folders, remove_tree
from lathe.server.repository.journal import Journal, Record, last_record
from lathe.server.repository.manifest import MANIFEST, Manifest, read_manifest
from lathe.server.repository.staging import Staging, StagingArea
from lathe.server.repository.staging_budget import StagingBudget
from lathe.server.types import ModelRef

ALIASES = "aliases.json"
CONTROL_FOLDER = ".lathe"
JOB_KEY_NAMESPACE = "job"  # the namespace of the idempotency keys of jobs
_MOST_UNCHANGED = 2_000  # calls that changed nothing, whose idempotency keys this process remembers
_READ_ONLY_ERRNOS = {errno.EROFS, errno.EACCES, errno.EPERM}

Change = Callable[[Aliases], Aliases]


@dataclass(frozen=True, slots=True)
class Origin:
    """The caller that asks for a change, its idempotency key, and the namespace (`space`) of that key.

    `fingerprint` identifies the content of the request: the same key with another fingerprint is refused.
    """

    actor: str = ""
    key: str | None = None
    fingerprint: str | None = None
    space: str = ""  # a caller's identity, or JOB_KEY_NAMESPACE; empty for callers without an API key

    @property
    def party(self) -> str:
        """The caller that the change is counted for where resources are shared fairly; empty: the server itself."""
        return f"{self.space} {self.actor}".strip()

    @property
    def entry(self) -> str | None:
        """The key as the log stores it: namespace, blank, key; None without a key, the key alone without a namespace.

        Keys contain no blank, so two namespaces never collide.
        """
        return f"{self.space} {self.key}" if self.space and self.key else self.key

    @property
    def legacy_journal_key(self) -> str | None:
        """The key as logs of releases without namespaces store it: for a job after `job-`; None without a key."""
        return f"job-{self.key}" if self.space == JOB_KEY_NAMESPACE and self.key else self.key


@dataclass(frozen=True, slots=True)
class Outcome:
    """The change that was made now, or, if `replayed`, earlier under the same idempotency key.

    Without `changed` nothing was to be changed: the record describes the present state, and is in no log.
    """

    record: Record
    replayed: bool = False
    changed: bool = True

    @property
    def version(self) -> int:
        """The version that was published, adopted, deleted or put on trial, or that the alias names now."""
        return self.record.version


class Store:
    """One repository. Methods block; usable from several threads and processes at the same time.

    Besides the errors that they name, changes raise Unavailable if the repository is read-only, locked for too long,
    its storage fails, or the model's aliases are damaged; StorageFull if the disk is full; Unprocessable if another
    request used the idempotency key; and what `change` raises. An error means that nothing was changed, except if the
    storage fails after the commit.
    """

    def __init__(
        self,
        root: Path,
        fs: Fs | None = None,
        *,
        lock_timeout: float = 10.0,
        max_staging: int = 1 << 62,
        space: DiskSpace | None = None,
    ) -> None:
        """`lock_timeout`: in seconds. `max_staging`: bytes of all running uploads. `space`: the disk's free space."""
        self.root = root
        self.read_only: str | None = None  # why nothing can be written
        self._fs = fs or Fs()
        self._control = root / CONTROL_FOLDER
        self._lock = FileLock(self._control / "lock", lock_timeout, "the repository")
        staged = StagingBudget(max_staging, "models", space=space)
        self._staging = StagingArea(self._fs, self._control / "staging", staged)
        self._journals: dict[str, Journal] = {}
        self._durable_models: set[str] = set()  # models whose folder is known to be durable
        self._unchanged: dict[tuple[str, str], Record] = {}  # by model and idempotency key: calls that changed nothing

    # start and stop

    def open(self) -> None:
        """Apply or undo the changes that a crash interrupted; a repository that cannot be written opens read-only.

        Raises FileNotFoundError if there is no folder, Unavailable if another process holds the lock for too long, and
        OSError.
        """
        if not self.root.is_dir():
            raise FileNotFoundError(f"model repository {self.root}: no such folder")
        try:
            self._make_control()
            with self._lock.hold():
                self._recover_all()
                self._staging.open()
        except OSError as error:
            if error.errno not in _READ_ONLY_ERRNOS:
                raise
            self.read_only = error.strerror or "read-only"

    def close(self) -> None:
        """Remove this process's staging folder."""
        if self.read_only is None:
            self._staging.close()

    # reading, without the lock

    def models(self) -> list[str]:
        """Return the names of the models that have aliases or versions, sorted."""
        folders = [
            e.name for e in os.scandir(self.root) if names.is_model_name(e.name) and e.is_dir(follow_symlinks=False)
        ]
        return sorted(name for name in folders if (self.root / name / ALIASES).exists() or self.versions(name))

    def versions(self, model: str) -> list[int]:
        """Return the numbers of a model's version folders, hand-copied ones too, ascending; [] without a folder.

        Raises BadRequest for an invalid name of a model.
        """
        try:
            entries = list(os.scandir(self.root / names.check_model(model)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            int(e.name) for e in entries if names.is_version_number(e.name) and e.is_dir(follow_symlinks=False)
        )

    def folder(self, model: str, version: int) -> Path:
        """Return the folder of a version; raises NotFound, BadRequest for an invalid name of a model."""
        folder = self.root / names.check_model(model) / str(version)
        if folder.is_symlink() or not folder.is_dir():
            raise NotFound(f"model {model!r} has no version {version}")
        return folder

    def manifest(self, model: str, version: int) -> Manifest | None:
        """Return a version's manifest, None if it has none, as hand-copied ones.

        Raises NotFound, DamagedDocument, OSError.
        """
        try:
            return read_manifest(self.folder(model, version))
        except FileNotFoundError:
            return None

    def state(self, model: str) -> Aliases:
        """Return the aliases after the last change, from `aliases.json`; without any change, empty ones.

        If that file is missing or damaged, or the repository read-only, the log is read too: the newer state counts.
        A damaged file counts as empty if the log has no valid record; DamagedDocument if there is no log.
        """
        try:
            document = self._read_aliases(model)
        except DamagedDocument:
            document = None
            if not self._log(model).exists():
                raise
        if document is None or self.read_only:
            newest = last_record(self._log(model))
            if newest and (document is None or newest.generation > document.generation):
                return newest.state
        return document or Aliases()

    def pipelines(self) -> dict[ModelRef, Definition]:
        """Return the definitions of all versions that are pipelines, without those that cannot be read."""
        found = {}
        for model in self.models():
            for version in self.versions(model):
                with suppress(BadPipeline, OSError):
                    found[ModelRef(model, version)] = read_definition(self.root / model / str(version))
        return found

    def loading_order(self) -> list[list[str]]:
        """Return the models in groups; a pipeline is in a later group than the models it uses, except in a cycle."""
        uses: dict[str, set[str]] = {model: set() for model in self.models()}
        for ref, definition in self.pipelines().items():
            uses.setdefault(ref.name, set()).update(definition.models & uses.keys())
        groups = []
        while uses:
            ready = [model for model, used in uses.items() if not used & uses.keys()] or list(uses)  # a cycle: all
            groups.append(ready)
            uses = {model: used for model, used in uses.items() if model not in ready}
        return groups

    def audit(self, model: str) -> list[Record]:
        """Return the newest changes in a model's log, oldest first; at most `journal.MAX_REMEMBERED`.

        Raises as `Journal.snapshot`.
        """
        return self._journal(model).snapshot()

    def find_key(self, model: str, origin: Origin) -> Outcome | None:
        """Return the outcome of the call with the same idempotency key, None if there is none or `origin` has no key.

        Raises Unprocessable if its request differed, Unavailable if the log cannot be read.
        """
        with storage_errors("reading the log"):
            if (found := _replayable(self._journal(model), origin)) is not None:
                return Outcome(found, replayed=True)
        if (found := self._unchanged.get((model, origin.entry or ""))) is None:
            return None
        return Outcome(_checked(found, origin), replayed=True, changed=False)

    # changes, under the lock

    def stage(self) -> Staging:
        """Return a new staging folder for a version; raises Unavailable, StorageFull."""
        self._check_writable()
        with storage_errors("staging"):
            return self._staging.begin()

    def publish(
        self, model: str, staging: Staging, manifest: Manifest, change: Change, origin: Origin, reason: str = ""
    ) -> Outcome:
        """Make `staging` the next version and apply `change` to the aliases, both or none.

        `change` finds the new version number in the state's `high_water`, and may raise to refuse.
        """
        names.check_model(model)
        with storage_errors("publishing"):
            staging.seal(manifest)

        def build(state: Aliases) -> Record:
            state = state.with_high_water(state.high_water + 1)
            record = self._record("publish", change(state), origin, state.high_water)
            self._ensure_model_folder(model)
            return replace(record, digest=manifest.digest, staging=self._staging.name_of(staging), reason=reason)

        return self._change(model, origin, build)

    def adopt(self, model: str, version: int, manifest: Manifest, change: Change) -> Outcome:
        """Adopt a hand-copied version: write its manifest if it has none, log its number, and apply `change`.

        Raises NotFound without its folder, DamagedDocument if its manifest is invalid.
        """

        def build(state: Aliases) -> Record:
            if self.manifest(model, version) is None:
                self._write_manifest(self.folder(model, version), manifest)
            record = self._record("adopt", change(state.with_high_water(version)), Origin(), version)
            return replace(record, digest=manifest.digest)

        return self._change(model, Origin(), build)

    def move(self, model: str, action: str, alias: str, change: Change, origin: Origin) -> Outcome:
        """Apply `change`, which moves `alias` (`action`: alias or rollback); raises NotFound for a missing version.

        An alias that stays where it is is no change: nothing is logged.
        """

        def build(state: Aliases) -> Record:
            changed = change(state)
            version = changed.get(alias).version
            self.folder(model, version)
            record = replace(self._record(action, changed, origin, version), alias=alias)
            return replace(record, state=state) if changed == state else record

        return self._change(model, origin, build)

    def change_trial(
        self, model: str, action: str, version: int, change: Change, origin: Origin, reason: str = ""
    ) -> Outcome:
        """Apply `change`, which begins the trial of `version`, begins its next step, or ends it.

        The `action` is canary, step, or one of promoted, rolled_back and cancelled. Raises NotFound if the version is
        needed afterwards and has no folder.
        """

        def build(state: Aliases) -> Record:
            changed = change(state)
            if changed.canary is not None or changed.version(names.LIVE_ALIAS) == version:
                self.folder(model, version)
            return replace(self._record(action, changed, origin, version), reason=reason)

        return self._change(model, origin, build)

    def delete(self, model: str, version: int, origin: Origin) -> Outcome:
        """Remove a version; raises NotFound, or Conflict if an alias, a trial or a pipeline names it."""

        def build(state: Aliases) -> Record:
            self.folder(model, version)
            self._check_unused(ModelRef(model, version))
            return self._record("delete", state.without_version(version), origin, version)

        outcome = self._change(model, origin, build)
        self._empty_trash()
        return outcome

    # details

    def _change(self, model: str, origin: Origin, build: Callable[[Aliases], Record]) -> Outcome:
        """Make the change that `build` returns; none if its record has the present generation, or at a repetition."""
        self._check_writable()
        names.check_model(model)
        with storage_errors("writing"), self._lock.hold():
            state = self._recover(model)
            if replayed := self.find_key(model, origin):
                return replayed
            record = build(state)
            if record.generation == state.generation:
                self._remember_unchanged(model, origin, record)
                return Outcome(record, changed=False)
            self._draft_aliases(model, record)  # may fail on a full disk, so before the commit
            record = self._journal(model).append(record)
            self._apply(model, record)
            return Outcome(record)

    def _remember_unchanged(self, model: str, origin: Origin, record: Record) -> None:
        """Remember the idempotency key of a call that changed nothing, so that a repetition does nothing either.

        This process remembers the latest `_MOST_UNCHANGED` of them.
        """
        if origin.entry is not None:
            self._unchanged[model, origin.entry] = record
            if len(self._unchanged) > _MOST_UNCHANGED:
                del self._unchanged[next(iter(self._unchanged))]

    def _check_unused(self, ref: ModelRef) -> None:
        for pipeline, definition in self.pipelines().items():
            if ref in definition.pins:
                raise Conflict(f"version {ref.version} of model {ref.name!r} is a step of pipeline {pipeline}")

    def _record(self, action: str, state: Aliases, origin: Origin, version: int) -> Record:
        return Record(
            time=now_rfc3339(),
            action=action,
            state=state.with_next_generation(),
            version=version,
            actor=origin.actor,
            key=origin.entry,
            fingerprint=origin.fingerprint,
        )

    def _apply(self, model: str, record: Record) -> None:
        """Apply a durable record, whose draft of the aliases is written; idempotent."""
        folder = self.root / model
        version = folder / str(record.version)
        if record.action == "publish" and record.staging:
            if not version.exists():
                self._fs.rename(self._staging.locate(record.staging), version)
            self._fs.sync_dir(folder)
        elif record.action == "delete":
            if version.exists():
                self._fs.rename(version, self._control / "trash" / secrets.token_hex(8))
            self._fs.sync_dir(folder)
        self._fs.rename(_draft(folder / ALIASES), folder / ALIASES)

    def _make_control(self) -> None:
        """Make and sync the control folders; always, because a crash may have left them made but not synced."""
        control = self._control
        make_folders(self._fs, control, control / "log", control / "staging", control / "trash")
        self._fs.sync_dir(control)
        self._fs.sync_dir(self.root)

    def _recover_all(self) -> None:
        for model in {*self.models(), *(path.stem for path in (self._control / "log").glob("*.log"))}:
            if names.is_model_name(model):
                self._recover_quietly(model)
        self._empty_trash()

    def _recover_quietly(self, model: str) -> None:
        try:
            self._recover(model)
        except DamagedDocument:
            return  # the next reader of this model's state reports it

    def _recover(self, model: str) -> Aliases:
        """Apply the model's last record if it is not applied yet, or undo it if its staging folder is lost.

        Returns the state after it. DamagedDocument if `aliases.json` is damaged and the log has no record.
        """
        journal = self._journal(model)
        journal.refresh()
        last = journal.last
        try:
            document = self._read_aliases(model)
        except DamagedDocument:
            if last is None:
                raise
            document = None
        highest_folder = max(self.versions(model), default=0)
        if last is None or (document and document.generation >= last.generation):
            return (document or Aliases()).with_high_water(highest_folder)
        if self._is_lost(model, last):
            last = self._undo(model, journal, document)
        journal.settle()
        if (self.root / model).is_dir():
            self._draft_aliases(model, last)
            self._apply(model, last)
        return last.state.with_high_water(highest_folder)

    def _is_lost(self, model: str, record: Record) -> bool:
        if record.action != "publish" or record.staging is None:
            return False
        return (
            not (self.root / model / str(record.version)).exists() and not self._staging.locate(record.staging).exists()
        )

    def _undo(self, model: str, journal: Journal, document: Aliases | None) -> Record:
        *earlier, lost = journal.snapshot()
        before = earlier[-1].state if earlier else document or Aliases()
        state = replace(before.with_high_water(lost.state.high_water), generation=lost.generation)
        return journal.append(self._record("void", state, Origin(), lost.version))

    def _journal(self, model: str) -> Journal:
        return self._journals.setdefault(model, Journal(self._fs, self._log(model)))

    def _log(self, model: str) -> Path:
        return self._control / "log" / f"{names.check_model(model)}.log"

    def _read_aliases(self, model: str) -> Aliases | None:
        try:
            with open_plain(self.root / names.check_model(model) / ALIASES) as file:
                return Aliases.from_json(orjson.loads(file.read()))
        except FileNotFoundError:
            return None
        except orjson.JSONDecodeError as error:
            raise DamagedDocument(f"{ALIASES} of model {model!r}: not JSON: {error}") from error

    def _draft_aliases(self, model: str, record: Record) -> None:
        """Write the next `aliases.json` beside the present one. No sync: the log is synced, and has its content."""
        content = orjson.dumps(record.state.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        self._write(_draft(self.root / model / ALIASES), content, durable=False)

    def _write_manifest(self, folder: Path, manifest: Manifest) -> None:
        path = folder / MANIFEST
        self._write(_draft(path), manifest.dump(), durable=True)
        self._fs.rename(_draft(path), path)

    def _write(self, path: Path, content: bytes, *, durable: bool) -> None:
        fd = self._fs.replace(path)
        try:
            self._fs.write(fd, content)
            if durable:
                self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    def _ensure_model_folder(self, model: str) -> None:
        """Make and sync the model's folder, once per process: an existing one may not have been synced."""
        if model not in self._durable_models or not (self.root / model).is_dir():
            make_folders(self._fs, self.root / model)
            self._fs.sync_dir(self.root)
            self._durable_models.add(model)

    def _empty_trash(self) -> None:
        try:
            for folder in (self._control / "trash").iterdir():
                remove_tree(self._fs, folder)
        except OSError:
            return  # the next start tries again

    def _check_writable(self) -> None:
        if self.read_only:
            raise Unavailable(f"the model repository cannot be written: {self.read_only}")


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def now_rfc3339() -> str:
    """Return the present time as RFC 3339 in UTC, with milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """A context manager that turns an OSError into the error for the client: 507 if the storage is full, otherwise 503.

    A DamagedDocument gives 503, too. `doing` names the operation in the message.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(doing, error) from error
    except DamagedDocument as error:
        raise Unavailable(f"{doing}: {error}") from error


def storage_error(doing: str, error: OSError) -> ServerError:
    """Return the error for the client; it names the failure, never a path."""
    reason = os.strerror(error.errno) if error.errno else "failed"
    if is_out_of_space(error):
        return StorageFull(f"{doing}: the model repository's storage is full ({reason})")
    return Unavailable(f"{doing}: the model repository's storage failed ({reason})")


def _replayable(journal: Journal, origin: Origin) -> Record | None:
    """Return the change that the same request made before, None if there is none or `origin` has no key.

    Raises Unprocessable if another request used the key.
    """
    entry = origin.entry
    if entry is None:
        return None
    if (found := journal.find_key(entry)) is None:
        return _replayable_without_namespace(journal, origin)
    return _checked(found, origin)


def _checked(found: Record, origin: Origin) -> Record:
    """Return the record of an earlier request with the same key; raises Unprocessable if the request differed."""
    if found.fingerprint != origin.fingerprint:
        raise Unprocessable(f"Idempotency-Key {origin.key!r} was used before with another request")
    return found


def _replayable_without_namespace(journal: Journal, origin: Origin) -> Record | None:
    """Like `_replayable`, for logs of releases without namespaces; None unless actor and fingerprint are equal."""
    found = journal.find_key(origin.legacy_journal_key) if origin.space and origin.legacy_journal_key else None
    same = found is not None and (found.actor, found.fingerprint) == (origin.actor, origin.fingerprint)
    return found if same else None
