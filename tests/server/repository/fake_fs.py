"""Fakes of the file system layer: one models what is durable, one kills the process, one fails."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lathe.server.repository.fs import Fs

CHANGES = ("create", "replace", "append", "write", "truncate", "sync", "rename", "mkdir", "unlink", "rmdir", "sync_dir")

Site = tuple[str, int]  # file name, line


class Loss(NamedTuple):
    """Which changes that were not synced survive a power failure."""

    data: str  # none, half or all of what was written
    names: bool  # names added to folders
    removals: bool  # names removed from folders


LOSSES = [Loss(*choice) for choice in itertools.product(("none", "half", "all"), (False, True), (False, True))]


@dataclass(eq=False)
class File:
    content: bytes = b""
    durable: bytes = b""

    def after(self, loss: Loss) -> bytes:
        if loss.data == "all" or self.content == self.durable:
            return self.content
        if loss.data == "none":
            return self.durable
        kept = self.durable if self.content.startswith(self.durable) else b""
        return self.content[: (len(kept) + len(self.content)) // 2]


class NameChange(NamedTuple):
    name: str
    node: File | Folder | None  # None: removed


@dataclass(eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[NameChange, ...]] = field(default_factory=list)  # each survives whole or not at all

    def change(self, *changes: NameChange) -> None:
        self.pending.append(changes)
        _apply(self.entries, changes)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def after(self, loss: Loss) -> dict[str, File | Folder]:
        entries = dict(self.durable)
        for changes in self.pending:
            adds = any(change.node is not None for change in changes)
            if loss.names if adds else loss.removals:
                _apply(entries, changes)
        return entries


def _apply(entries: dict[str, File | Folder], changes: tuple[NameChange, ...]) -> None:
    for name, node in changes:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


Tree = tuple[tuple[str, bytes | None], ...]  # path and content; None for a folder


class RecordingFs(Fs):
    """Works on the real disk and models which changes are durable; observers are called after each change.

    The syncs of the call site `deaf` are ignored, as if the line were deleted."""

    def __init__(self, root: Path, deaf: Site | None = None) -> None:
        self.root = root
        self.deaf = deaf
        self.tree = _model_of(root)
        self.sites: set[Site] = set()
        self.die_after: tuple[str, str] | None = None  # a change and the end of a file's name: the process ends there
        self.observers: list[Callable[[], None]] = []
        self._open: dict[int, File] = {}
        self._paths: dict[int, Path] = {}

    def states(self) -> Iterator[tuple[Loss, Tree]]:
        """The possible contents of the disk if the power fails now."""
        return ((loss, tuple(_walk(self.tree, "", loss))) for loss in LOSSES)

    def create(self, path: Path) -> int:
        return self._opened(super().create(path), path)

    def replace(self, path: Path) -> int:
        fd = self._opened(super().replace(path), path)
        self._open[fd].content = b""
        return fd

    def append(self, path: Path) -> int:
        return self._opened(super().append(path), path)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        super().write(fd, data)
        self._open[fd].content += bytes(data)
        self._changed("write", self._paths[fd])

    def truncate(self, path: Path, size: int) -> None:
        super().truncate(path, size)
        folder, name = self._locate(path)
        file = folder.entries[name]
        assert isinstance(file, File)
        file.content = file.content[:size]
        self._changed()

    def sync(self, fd: int) -> None:
        if not self._ignored():
            self._open[fd].durable = self._open[fd].content
        self._changed()

    def close(self, fd: int) -> None:
        super().close(fd)
        self._open.pop(fd)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        (folder, name), (other, new) = self._locate(source), self._locate(target)
        node = folder.entries[name]
        if folder is other:
            folder.change(NameChange(new, node), NameChange(name, None))
        else:
            other.change(NameChange(new, node))
            folder.change(NameChange(name, None))
        self._changed()

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        folder, name = self._locate(path)
        folder.change(NameChange(name, Folder()))
        self._changed()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._removed(path)

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self._removed(path)

    def sync_dir(self, path: Path) -> None:
        folder, _ = self._locate(path / "any")
        if not self._ignored():
            folder.sync()
        self._changed()

    def _opened(self, fd: int, path: Path) -> int:
        folder, name = self._locate(path)
        if name not in folder.entries:
            folder.change(NameChange(name, File()))
        file = folder.entries[name]
        assert isinstance(file, File)
        self._open[fd], self._paths[fd] = file, path
        self._changed()
        return fd

    def _removed(self, path: Path) -> None:
        folder, name = self._locate(path)
        folder.change(NameChange(name, None))
        self._changed()

    def _locate(self, path: Path) -> tuple[Folder, str]:
        *above, name = path.relative_to(self.root).parts
        folder = self.tree
        for part in above:
            entry = folder.entries.get(part) or folder.entries.setdefault(part, Folder())
            assert isinstance(entry, Folder)
            folder = entry
        return folder, name

    def _ignored(self) -> bool:
        frame = sys._getframe(2)
        site = (Path(frame.f_code.co_filename).name, frame.f_lineno)
        self.sites.add(site)
        return site == self.deaf

    def _changed(self, what: str = "", path: Path = Path()) -> None:
        for observe in self.observers:
            observe()
        if self.die_after and (what, path.suffix) == self.die_after:
            raise Killed


class Killed(BaseException):
    """The process ends here, from the repository's point of view."""


def _model_of(path: Path) -> Folder:
    folder = Folder()
    for entry in path.iterdir():
        folder.entries[entry.name] = (
            _model_of(entry) if entry.is_dir() else File(entry.read_bytes(), entry.read_bytes())
        )
    folder.durable = dict(folder.entries)
    return folder


def _walk(folder: Folder, prefix: str, loss: Loss) -> Iterator[tuple[str, bytes | None]]:
    for name, node in sorted(folder.after(loss).items()):
        path = f"{prefix}{name}"
        if isinstance(node, File):
            yield path, node.after(loss)
        else:
            yield path, None
            yield from _walk(node, f"{path}/", loss)


def lay_out(tree: Tree, root: Path) -> None:
    """Write the files of `tree` into a folder."""
    root.mkdir()
    for path, content in tree:
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


class CountingFs(Fs):
    """Calls `act` before the change number `at`; counts all changes."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.step = 0
        self.names: list[str] = []

    def act(self) -> None:
        """The action at the chosen change."""

    def __getattribute__(self, name: str) -> object:
        if name in CHANGES:
            self.step += 1
            self.names.append(name)
            if self.step == self.at:
                self.act()
        return super().__getattribute__(name)


class KillingFs(CountingFs):
    """Kills the process before the change number `at`."""

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_process(work: Callable[[], object]) -> bool:
    """Run `work` in a child process; return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


class FailingFs(CountingFs):
    """Fails the change number `at`; later ones succeed, unless `lasting`."""

    def __init__(self, at: int, number: int = errno.EIO, *, lasting: bool = False) -> None:
        super().__init__(at)
        self.number = number
        self.is_lasting = lasting

    def act(self) -> None:
        if self.is_lasting:
            self.at = self.step + 1
        raise OSError(self.number, os.strerror(self.number))


class ReadOnlyFs(Fs):
    """A read-only mount."""

    def __getattribute__(self, name: str) -> object:
        if name in CHANGES:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return super().__getattribute__(name)
