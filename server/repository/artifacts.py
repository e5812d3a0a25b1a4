"""The cache of compiled models: folders named by all that went into them, checked byte for byte before use.

What lies here is native code. It is made by this server, used only if it is whole and owned by this user alone, never
taken from a version's folder and never from the network. Losing it costs a compilation.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import platform
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import orjson

from server.repository.manifest import digest_file

_DIGESTS = "digests.json"
_ABANDONED = 3600.0  # seconds after which nobody compiles there any more


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a model is compiled for."""

    max_batch: int
    precision: str
    threads: int
    device: str = "cpu"
    device_memory: int = 0  # bytes of its memory that the model may take; 0: as much as there is
    packing: int = 0  # tokens of a run in which sequences of different lengths lie one after the other; 0: none do


def key_of(digest: str, options: BuildOptions, compiler: str) -> str:
    """Return the name of the artifact that a compiler makes of a model file (its sha256) under these options."""
    return hashlib.sha256(repr((digest, options, compiler)).encode()).hexdigest()


@cache
def compiler_at_start() -> str:
    """Return :func:`compiler_now` as it was when this was first asked for: what this process runs."""
    return compiler_now()


def compiler_now() -> str:
    """Identify the compiler on disk by its sources and LLVM, and the processor by what code may use of it."""
    machine = f"{platform.machine()} {_processor()} {os.environ.get('LATHE_TARGET', '')}"
    seen = hashlib.sha256(f"{machine} {metadata.version('llvmlite')}".encode())
    package = Path(__file__).parents[2] / "core"
    for source in sorted(package.rglob("*.py")):
        seen.update(source.read_bytes())
    for name in filter(None, map(str.strip, os.environ.get("LATHE_OPERATORS", "").split(","))):
        spec = find_spec(name)
        seen.update(Path(spec.origin).read_bytes() if spec is not None and spec.origin else b"")
    return seen.hexdigest()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def usable_folder(wanted: Path) -> Path:
    """Return the folder if the cache can be there, else (a read-only mount) a temporary one until the process ends."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        log.warning("the cache folder cannot be written (%s): models are compiled anew at each start", error.strerror)
    temporary = Path(tempfile.mkdtemp(prefix="lathe-cache-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


class ArtifactCache:
    """The folder of artifacts. Several processes may share it."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes

    @property
    def shared(self) -> Path:
        """Where the compiler keeps what several artifacts share: object code, findings of its tuner."""
        return self._root / "shared"

    def open(self) -> None:
        """Make the folder and remove what broken-off compilations left."""
        self.shared.mkdir(parents=True, exist_ok=True)
        for work in self._root.glob("work/*"):
            if time.time() - work.stat().st_mtime > _ABANDONED:
                shutil.rmtree(work, ignore_errors=True)

    def begin(self) -> Path:
        """Return a fresh folder to compile in."""
        work = self._root / "work" / secrets.token_hex(8)
        work.mkdir(parents=True, mode=0o700)
        return work

    def find(self, key: str) -> Path | None:
        """Return an artifact if it is there, whole and ours; a damaged one is removed."""
        folder = self._path(key)
        if not folder.is_dir():
            return None
        if not _is_sound(folder):
            self.drop(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)  # the time of last use, for collect()
        return folder

    def keep(self, key: str, made: Path) -> Path:
        """Take what a compilation made under ``key``; returns where it now lies."""
        folder = self._path(key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _seal(made)
        with contextlib.suppress(OSError):
            os.rename(made, folder)  # another process was faster where this fails
        found = self.find(key)
        if found is None:
            raise OSError(None, "the compiled model could not be kept")
        return found

    def drop(self, key: str) -> None:
        """Remove an artifact that is of no use."""
        shutil.rmtree(self._path(key), ignore_errors=True)

    def collect(self, in_use: Collection[Path]) -> None:
        """Delete the artifacts unused for longest until the rest fits."""
        folders = [path for path in self._root.glob("models/*") if path.is_dir()]
        sizes = {path: sum(file.stat().st_size for file in path.rglob("*")) for path in folders}
        excess = sum(sizes.values()) - self._max_bytes
        for path in sorted(folders, key=lambda path: path.stat().st_mtime):
            if excess > 0 and path not in in_use:
                shutil.rmtree(path, ignore_errors=True)
                excess -= sizes[path]

    def _path(self, key: str) -> Path:
        return self._root / "models" / key


def _digests(folder: Path) -> dict[str, str]:
    """Digest every file; raises OSError at a link, or at what others own or may write."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if status.st_uid != os.geteuid() or (not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o022):
            raise OSError(None, "an artifact belongs to its owner alone")
        if not stat.S_ISDIR(status.st_mode) and path.name != _DIGESTS:
            digests[str(path.relative_to(folder))] = digest_file(path).sha256
    return digests


def _seal(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (folder / _DIGESTS).write_bytes(orjson.dumps(_digests(folder)))
    (folder / _DIGESTS).chmod(0o600)


def _is_sound(folder: Path) -> bool:
    try:
        return bool(orjson.loads((folder / _DIGESTS).read_bytes()) == _digests(folder))
    except (OSError, orjson.JSONDecodeError):
        return False
