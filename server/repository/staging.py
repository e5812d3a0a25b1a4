"""Staging folders: an upload is written here before it becomes a version.

Each process has its own folder, and holds a lock in it while it lives. The next start removes the folders of dead
processes, and leaves those of living ones.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from lathe.server.fair_slots import CLIENT
from lathe.server.repository import names
from lathe.server.repository.file_lock import try_lock
from lathe.server.repository.fs import Fs, make_folders, remove_tree
from lathe.server.repository.manifest import MANIFEST, FileEntry, Manifest
from lathe.server.repository.staging_budget import StagingBudget, StagingClaim

_LOCK = "lock"


class StagedFile:
    """A file that is being written, with its running sha256."""

    def __init__(self, fs: Fs, path: Path, claim: StagingClaim | None) -> None:
        self._fs = fs
        self._claim = claim
        self._fd: int | None = fs.create(path)
        self._digest = hashlib.sha256()
        self._size = 0

    @property
    def entry(self) -> FileEntry:
        """The sha256 and size of the content so far."""
        return FileEntry(self._digest.hexdigest(), self._size)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; raises StorageFull or QuotaExceeded if the budget of uploads is used up, and OSError."""
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
        """Close the file; idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._fs.close(fd)


class Staging:
    """The folder of an upload, a version or a dataset, that is being received."""

    def __init__(self, fs: Fs, path: Path, claim: StagingClaim) -> None:
        self._fs = fs
        self._claim = claim
        self._files: dict[str, StagedFile] = {}
        self.path = path
        fs.mkdir(path)

    @property
    def entries(self) -> dict[str, FileEntry]:
        """Digest and size of each file by its name, for the manifest."""
        return {name: file.entry for name, file in self._files.items()}

    def create(self, name: str, *, counts: bool = True) -> StagedFile:
        """Create a file; raises BadRequest if no file of a version may have this name.

        `counts`: the bytes of the file count against the budget of uploads; writing raises if it is used up. False is
        for files that the server itself writes, such as the manifest.
        """
        claim = self._claim if counts else None
        file = self._files[name] = StagedFile(self._fs, self.path / names.check_file(name), claim)
        return file

    def release(self) -> None:
        """Stop counting the folder's bytes against the budget of uploads."""
        self._claim.release()

    def seal(self, manifest: Manifest) -> None:
        """Add the manifest, make all files durable, and close them; raises OSError."""
        self.create(MANIFEST, counts=False).write(manifest.dump())
        self.settle()

    def settle(self) -> None:
        """Close all files and make them durable; no file can be written afterwards."""
        for file in self._files.values():
            file.sync()
            file.close()
        self._fs.sync_dir(self.path)

    def discard(self) -> None:
        """Remove the folder, if it has not become a version. Never raises: the next start tries again."""
        try:
            for file in self._files.values():
                file.close()
            remove_tree(self._fs, self.path)
        except OSError:
            return
        finally:
            self._claim.release()


class StagingArea:
    """The staging folder of this process. The caller holds the repository's lock for `open`."""

    def __init__(self, fs: Fs, root: Path, budget: StagingBudget) -> None:
        self._fs = fs
        self._root = root
        self._budget = budget
        self._own = root / f"{os.getpid()}-{secrets.token_hex(6)}"
        self._lock_fd: int | None = None

    def open(self) -> None:
        """Remove the folders of dead processes, then make and lock this process's folder."""
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
        """Make a folder for an upload, counted for the caller in the context variable `CLIENT`.

        Raises StorageFull, OSError.
        """
        claim = self._budget.begin(CLIENT.get())
        try:
            return Staging(self._fs, self._own / secrets.token_hex(8), claim)
        except BaseException:
            claim.release()
            raise

    def name_of(self, staging: Staging) -> str:
        """Return the name of a staging folder in journal records."""
        return str(staging.path.relative_to(self._root))

    def locate(self, name: str) -> Path:
        """Return the staging folder of a name in a journal record."""
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
