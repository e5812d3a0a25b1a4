"""Datasets on disk: contents by their sha256, and names that stand for them.

    <root>/content/<sha256>/{data, about.json}     never changes
    <root>/names/<name>.json                       what the name stands for, and stood for
    <root>/{lock, staging/, trash/}

What a change needs is made durable first; writing or removing the file of the name is the change. A content that no
name stands for, or stood for, is nobody's: it goes at once, or, after a crash, at the next start.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from server.datasets.record import Content, Named, Naming, check_name, is_digest
from server.errors import Conflict, NotFound, StorageFull, Unavailable
from server.repository.aliases import DamagedDocument
from server.repository.fs import Fs, make_folders, remove_tree
from server.repository.lock import FileLock
from server.repository.space import Space
from server.repository.staged import StagingBudget
from server.repository.staging import Staging, StagingArea
from server.repository.store import storage_errors

DATA, ABOUT = "data", "about.json"
_NAMES = "[!.]*.json"  # drafts begin with a dot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A name and what it stands for."""

    named: Named
    content: Content


class DatasetStore:
    """One folder of datasets. Methods block; threads and processes may call at the same time."""

    def __init__(
        self,
        root: Path,
        budget: int,
        fs: Fs | None = None,
        *,
        lock_timeout: float = 10.0,
        space: Space | None = None,
    ) -> None:
        self._root = root
        self._budget = budget  # bytes of all contents together
        self._fs = fs or Fs()
        self._contents, self._names, self._trash = root / "content", root / "names", root / "trash"
        self._lock = FileLock(root / "lock", lock_timeout)
        self._kept = 0  # bytes of all contents when they were last counted: at each change here, and at each upload
        staged = StagingBudget(budget, "datasets", lambda: self._kept, space)
        self._staging = StagingArea(self._fs, root / "staging", staged)

    # life

    def open(self) -> None:
        """Make the folders, and remove what a crash left half done; raises OSError."""
        root = self._root
        make_folders(self._fs, *reversed([above for above in root.parents if not above.exists()]), root)
        make_folders(self._fs, self._contents, self._names, self._trash, root / "staging")
        self._fs.sync_dir(root)
        self._fs.sync_dir(root.parent)
        with self._lock.held():
            self._staging.open()
            for draft in self._names.glob(".*.new"):
                self._fs.unlink(draft)
            self._collect()

    def close(self) -> None:
        """Remove this process's staging folder."""
        self._staging.close()

    # reading: no lock

    def names(self) -> list[Named]:
        """Return all names, sorted; damaged ones are logged and left out."""
        return sorted(self._readable_names(), key=lambda named: named.name)

    def named(self, name: str) -> Named:
        """Return what a name stands for; raises NotFound, Unavailable for a damaged record."""
        try:
            return _read_name(self._file(name))
        except FileNotFoundError:
            raise NotFound(f"unknown dataset {name[:80]!r}") from None

    def content(self, digest: str) -> Content:
        """Return what is known of a content; raises NotFound, Unavailable for a damaged record."""
        try:
            return Content.parse((self._folder(digest) / ABOUT).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"unknown dataset with sha256 {digest}") from None
        except DamagedDocument as error:
            raise Unavailable(f"dataset with sha256 {digest}: its record is damaged: {error}") from error

    def path(self, digest: str) -> Path:
        """Return where a content's file lies; raises NotFound."""
        path = self._folder(digest) / DATA
        if not path.is_file():
            raise NotFound(f"unknown dataset with sha256 {digest}")
        return path

    def stored(self) -> int:
        """Return the bytes of all contents together."""
        self._kept = sum(path.stat().st_size for path in self._contents.glob(f"*/{DATA}"))
        return self._kept

    # changing: under the lock

    def stage(self) -> Staging:
        """Begin a content; raises StorageFull when the budget has been spent."""
        if self.stored() >= self._budget:
            raise StorageFull(f"datasets take {self._budget} bytes, which is all they may: delete some")
        with storage_errors("staging"):
            return self._staging.begin()

    def keep(self, name: str, staging: Staging, content: Content, naming: Naming) -> Named:
        """Make a staged file a content, and let ``name`` stand for it; both or none."""
        staging.create(ABOUT, counts=False).write(content.dump())
        staging.settle()
        with self._lock.held():
            before = self._find(name)
            named = before.given(naming) if before else Named(name, (naming,))
            try:
                self._enter(staging, content)
                if named != before:
                    self._write(named)
            except BaseException:
                self._collect()
                raise
            return named

    def remove(self, name: str, digest: str | None, needed: Collection[str]) -> frozenset[str]:
        """Forget a name, or of what it stood for only ``digest``; returns the contents that are gone with it.

        Raises NotFound, and Conflict when one that is ``needed`` would go.
        """
        with self._lock.held():
            named = self.named(name)
            left = named.without(digest) if digest is not None else None
            if left == named:
                raise NotFound(f"dataset {name!r} never had sha256 {digest}")
            going = named.digests - (left.digests if left else frozenset()) - self._referenced(besides=name)
            if wanted := sorted(going & set(needed)):
                raise Conflict(f"dataset {name!r}: a job that has not ended needs sha256 {wanted[0]}")
            if left is not None:
                self._write(left)
            else:
                self._fs.unlink(self._file(name))
                self._fs.sync_dir(self._names)
            self._collect()
            self.stored()
            return frozenset(going)

    # how

    def _file(self, name: str) -> Path:
        return self._names / f"{check_name(name)}.json"

    def _folder(self, digest: str) -> Path:
        if not is_digest(digest):
            raise NotFound(f"unknown dataset {digest[:80]!r}")
        return self._contents / digest

    def _find(self, name: str) -> Named | None:
        try:
            return self.named(name)
        except NotFound:
            return None

    def _readable_names(self) -> Iterator[Named]:
        for path in self._names.glob(_NAMES):
            try:
                yield _read_name(path)
            except FileNotFoundError:
                continue  # removed meanwhile
            except Unavailable as error:
                log.error("left out of the list: %s", error)

    def _enter(self, staging: Staging, content: Content) -> None:
        folder = self._folder(content.digest)
        if not folder.exists():
            self._check_budget(content.size)
            self._fs.rename(staging.path, folder)
            self.stored()
            staging.release()  # it is counted among the contents from here on
        self._fs.sync_dir(self._contents)

    def _check_budget(self, size: int) -> None:
        if (stored := self.stored()) + size > self._budget:
            raise StorageFull(f"datasets take {stored} bytes, another {size} are more than the {self._budget} allowed")

    def _write(self, named: Named) -> None:
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

    def _referenced(self, besides: str = "") -> frozenset[str]:
        """The contents that names stand or stood for; raises Unavailable where one does not say."""
        paths = [path for path in self._names.glob(_NAMES) if path.stem != besides]
        return frozenset().union(*(_read_name(path).digests for path in paths))

    def _collect(self) -> None:
        """Remove contents that are nobody's. A damaged name might stand for any of them, so then all stay."""
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


def _read_name(path: Path) -> Named:
    """Read what a name stands for; raises FileNotFoundError, Unavailable where that is damaged."""
    try:
        return Named.parse(path.read_bytes())
    except DamagedDocument as error:
        raise Unavailable(f"dataset {path.stem!r}: its record is damaged: {error}") from error
