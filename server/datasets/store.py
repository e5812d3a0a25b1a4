"""Datasets on disk: contents by their sha256, and names that refer to them.

    <root>/content/<sha256>/{data, about.json}     never changes
    <root>/names/<name>.json                       the present content of the name, and its history
    <root>/{lock, staging/, trash/}

A change makes its files durable first; writing or removing the file of the name commits it. A content that is in no
name's history is garbage: it is removed at once or, after a crash, at the next start.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lathe.server.datasets.records import Content, DatasetName, NameEntry, check_name, is_digest
from lathe.server.errors import Conflict, NotFound, StorageFull, Unavailable
from lathe.server.repository.aliases import DamagedDocument
from lathe.server.repository.disk_space import DiskSpace
from lathe.server.repository.file_lock import FileLock
from lathe.server.repository.fs import Fs, make_folders, remove_tree
from lathe.server.repository.staging import Staging, StagingArea
from lathe.server.repository.staging_budget import StagingBudget
from lathe.server.repository.store import storage_errors

DATA, ABOUT = "data", "about.json"
_RECORDS = "[!.]*.json"  # drafts begin with a dot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A name and its present content."""

    named: DatasetName
    content: Content


class DatasetStore:
    """One folder of datasets. Methods block; usable from several threads and processes at the same time."""

    def __init__(
        self,
        root: Path,
        budget: int,
        fs: Fs | None = None,
        *,
        lock_timeout: float = 10.0,
        space: DiskSpace | None = None,
    ) -> None:
        self._root = root
        self._budget = budget  # bytes of all contents together
        self._fs = fs or Fs()
        self._contents, self._names, self._trash = root / "content", root / "names", root / "trash"
        self._lock = FileLock(root / "lock", lock_timeout, "the folder of datasets")
        self._stored_bytes = 0  # bytes of all contents at the last count, which each change and upload repeats
        staged = StagingBudget(budget, "datasets", lambda: self._stored_bytes, space)
        self._staging = StagingArea(self._fs, root / "staging", staged)

    # open and close

    def open(self) -> None:
        """Make the folders, and remove the remains of interrupted changes.

        Raises OSError, and Unavailable if another process holds the lock for `lock_timeout` seconds.
        """
        root = self._root
        make_folders(self._fs, *reversed([parent for parent in root.parents if not parent.exists()]), root)
        make_folders(self._fs, self._contents, self._names, self._trash, root / "staging")
        self._fs.sync_dir(root)
        self._fs.sync_dir(root.parent)
        with self._lock.hold():
            self._staging.open()
            for draft in self._names.glob(".*.new"):
                self._fs.unlink(draft)
            self._remove_garbage()

    def close(self) -> None:
        """Remove this process's staging folder."""
        self._staging.close()

    # reading, without the lock

    def names(self) -> list[DatasetName]:
        """Return all names, sorted; damaged ones are logged and omitted."""
        return sorted(self._readable_names(), key=lambda named: named.name)

    def named(self, name: str) -> DatasetName:
        """Return the record of a name; raises NotFound, BadRequest for invalid text, Unavailable if it is damaged."""
        try:
            return _read_name(self._file(name))
        except FileNotFoundError:
            raise NotFound(f"unknown dataset {name[:80]!r}") from None

    def content(self, digest: str) -> Content:
        """Return the record of a content; raises NotFound, Unavailable for a damaged record."""
        try:
            return Content.parse((self._folder(digest) / ABOUT).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"unknown dataset with sha256 {digest}") from None
        except DamagedDocument as error:
            raise Unavailable(f"dataset with sha256 {digest}: its record is damaged: {error}") from error

    def path(self, digest: str) -> Path:
        """Return the path of a content's file; raises NotFound."""
        path = self._folder(digest) / DATA
        if not path.is_file():
            raise NotFound(f"unknown dataset with sha256 {digest}")
        return path

    def count_stored_bytes(self) -> int:
        """Count and return the bytes of all contents."""
        total = 0
        for path in self._contents.glob(f"*/{DATA}"):
            with suppress(FileNotFoundError):  # removed since
                total += path.stat().st_size
        self._stored_bytes = total
        return total

    # changes

    def stage(self) -> Staging:
        """Return a new staging folder for an upload; raises StorageFull if budget or disk are full, Unavailable."""
        with storage_errors("staging"):
            if self.count_stored_bytes() >= self._budget:
                raise StorageFull(f"datasets use all of the {self._budget} bytes allowed: delete some")
            return self._staging.begin()

    def keep(self, name: str, staging: Staging, content: Content, naming: NameEntry) -> DatasetName:
        """Store a staged file as a content and move `name` to it, both or none; returns the name's record.

        Raises StorageFull if the content exceeds the budget, OSError, and Unavailable if the lock is held for too long
        or the name's record is damaged.
        """
        staging.create(ABOUT, counts=False).write(content.dump())
        staging.settle()
        with self._lock.hold():
            before = self._find(name)
            named = before.with_entry(naming) if before else DatasetName(name, (naming,))
            try:
                self._store_content(staging, content)
                if named != before:
                    self._write(named)
            except BaseException:
                self._remove_garbage()
                raise
            return named

    def remove(self, name: str, digest: str | None, needed: Collection[str]) -> frozenset[str]:
        """Remove a name, or only `digest` from its history; returns the digests of contents that are removed with it.

        These contents are in the history of no other name. Raises NotFound for an unknown name or a digest that is not
        in its history, Conflict if one of the contents is `needed`, and Unavailable if a record is damaged.
        """
        with self._lock.hold():
            named = self.named(name)
            remaining = named.without(digest) if digest is not None else None
            if remaining == named:
                raise NotFound(f"dataset {name!r} never had sha256 {digest}")
            removed = (
                named.digests - (remaining.digests if remaining else frozenset()) - self._referenced(except_name=name)
            )
            if in_use := sorted(removed & set(needed)):
                raise Conflict(f"dataset {name!r}: a job that has not ended needs sha256 {in_use[0]}")
            if remaining is not None:
                self._write(remaining)
            else:
                self._fs.unlink(self._file(name))
                self._fs.sync_dir(self._names)
            self._remove_garbage()
            self.count_stored_bytes()
            return frozenset(removed)

    # details

    def _file(self, name: str) -> Path:
        return self._names / f"{check_name(name)}.json"

    def _folder(self, digest: str) -> Path:
        if not is_digest(digest):
            raise NotFound(f"unknown dataset {digest[:80]!r}")
        return self._contents / digest

    def _find(self, name: str) -> DatasetName | None:
        try:
            return self.named(name)
        except NotFound:
            return None

    def _readable_names(self) -> Iterator[DatasetName]:
        for path in self._names.glob(_RECORDS):
            try:
                yield _read_name(path)
            except FileNotFoundError:
                continue  # removed meanwhile
            except Unavailable as error:
                log.error("omitted from the list: %s", error)

    def _store_content(self, staging: Staging, content: Content) -> None:
        folder = self._folder(content.digest)
        if not folder.exists():
            self._check_budget(content.size)
            self._fs.rename(staging.path, folder)
            self.count_stored_bytes()
            staging.release()  # from here on it is counted as a content
        self._fs.sync_dir(self._contents)

    def _check_budget(self, size: int) -> None:
        if (stored := self.count_stored_bytes()) + size > self._budget:
            raise StorageFull(f"datasets use {stored} bytes: another {size} exceed the {self._budget} allowed")

    def _write(self, named: DatasetName) -> None:
        path = self._file(named.name)
        draft = path.with_name(f".{path.name}.new")
        fd = self._fs.replace(draft)
        try:
            self._fs.write(fd, named.dump())
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)
        self._fs.rename(draft, path)
        self._fs.sync_dir(self._names)

    def _referenced(self, except_name: str = "") -> frozenset[str]:
        """Return the digests in the histories of all names but `except_name`; Unavailable if a record is damaged."""
        paths = [path for path in self._names.glob(_RECORDS) if path.stem != except_name]
        return frozenset().union(*(_read_name(path).digests for path in paths))

    def _remove_garbage(self) -> None:
        """Remove contents that are in no name's history; none if a name's record is damaged, as it may refer to any."""
        try:
            referenced = self._referenced()
        except Unavailable as error:
            log.error("no content is removed: %s", error)
            return
        for entry in list(os.scandir(self._contents)):
            if entry.name not in referenced:
                self._fs.rename(Path(entry.path), self._trash / secrets.token_hex(8))
        for folder in list(self._trash.iterdir()):
            remove_tree(self._fs, folder)


def _read_name(path: Path) -> DatasetName:
    """Read the record of a name; raises FileNotFoundError, Unavailable if it is damaged."""
    try:
        return DatasetName.parse(path.read_bytes())
    except DamagedDocument as error:
        raise Unavailable(f"dataset {path.stem!r}: its record is damaged: {error}") from error
