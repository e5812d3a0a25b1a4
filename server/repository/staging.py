"""Where an upload is put together before it becomes a version.

Each process has a folder of its own, with a lock it holds while it lives: what a dead process left is removed at the
next start, what a living one is writing is left alone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from server.places import PARTY
from server.repository import names
from server.repository.fs import Fs, make_folders, remove_tree
from server.repository.lock import try_lock
from server.repository.manifest import MANIFEST, FileEntry, Manifest
from server.repository.staged import StagingBudget, StagingClaim

_LOCK = "lock"


class StagedFile:
    """A file being written, digested on the way."""

    def __init__(self, fs: Fs, path: Path, claim: StagingClaim | None) -> None:
        self._fs = fs
        self._claim = claim
        self._fd: int | None = fs.create(path)
        self._digest = hashlib.sha256()
        self._size = 0

    @property
    def entry(self) -> FileEntry:
        """Digest and size of what has been written."""
        return FileEntry(self._digest.hexdigest(), self._size)

    def write(self, data: bytes | memoryview) -> None:
        """Add ``data``; raises StorageFull or QuotaExceeded where uploads take too much already."""
        assert self._fd is not None
        if self._claim is not None:
            self._claim.add(len(data))
        self._fs.write(self._fd, data)
        self._digest.update(data)
        self._size += len(data)

    def sync(self) -> None:
        """Make the content durable."""
        assert self._fd is not None
        self._fs.sync(self._fd)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._fs.close(fd)


class Staging:
    """The folder of one version to be."""

    def __init__(self, fs: Fs, path: Path, claim: StagingClaim) -> None:
        self._fs = fs
        self._claim = claim
        self._files: dict[str, StagedFile] = {}
        self.path = path
        fs.mkdir(path)

    @property
    def entries(self) -> dict[str, FileEntry]:
        """What the manifest will say of the files."""
        return {name: file.entry for name, file in self._files.items()}

    def create(self, name: str, *, counts: bool = True) -> StagedFile:
        """Begin a file; ``counts``: what uploads may take of the disk is a bound for it, as for all that was sent."""
        claim = self._claim if counts else None
        file = self._files[name] = StagedFile(self._fs, self.path / names.check_file(name), claim)
        return file

    def release(self) -> None:
        """Count it among uploads under way no more."""
        self._claim.release()

    def seal(self, manifest: Manifest) -> None:
        """Add the manifest and make everything durable."""
        self.create(MANIFEST, counts=False).write(manifest.dump())
        self.settle()

    def settle(self) -> None:
        """Make everything durable; no file can be written any more."""
        for file in self._files.values():
            file.sync()
            file.close()
        self._fs.sync_dir(self.path)

    def discard(self) -> None:
        """Remove the folder, if it has not become a version; never raises, the next start tries again."""
        try:
            for file in self._files.values():
                file.close()
            remove_tree(self._fs, self.path)
        except OSError:
            return
        finally:
            self._claim.release()


class StagingArea:
    """The staging folder of this process among those of others. Opened under the repository's lock."""

    def __init__(self, fs: Fs, root: Path, budget: StagingBudget) -> None:
        self._fs = fs
        self._root = root
        self._budget = budget
        self._own = root / f"{os.getpid()}-{secrets.token_hex(6)}"
        self._lock_fd: int | None = None

    def open(self) -> None:
        """Remove what the dead left, and make a folder that shows this process to be alive."""
        for folder in self._root.iterdir():
            if not _is_alive(folder):
                remove_tree(self._fs, folder)
        make_folders(self._fs, self._own)
        self._lock_fd = os.open(self._own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try_lock(self._lock_fd)

    def close(self) -> None:
        """Remove this process's folder."""
        if self._lock_fd is not None:
            fd, self._lock_fd = self._lock_fd, None
            remove_tree(self._fs, self._own)
            os.close(fd)

    def begin(self) -> Staging:
        """Make a fresh folder for one upload of whom this is done for."""
        claim = self._budget.begin(PARTY.get())
        try:
            return Staging(self._fs, self._own / secrets.token_hex(8), claim)
        except BaseException:
            claim.release()
            raise

    def name_of(self, staging: Staging) -> str:
        """Return what a journal record calls it."""
        return str(staging.path.relative_to(self._root))

    def locate(self, name: str) -> Path:
        """Return the folder a journal record means."""
        return self._root / name


def _is_alive(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)
