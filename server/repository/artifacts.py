"""The cache of compiled models: folders named by the hash of all their inputs, verified by digest before use.

The artifacts are native code. This server makes them, and uses them only if the digests match and this user alone owns
and may write them; it never takes them from a version's folder or the network. A lost artifact costs a compilation.
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

from lathe.server.repository.manifest import digest_file

_DIGESTS = "digests.json"
_ABANDONED = 3600.0  # seconds after which a work folder belongs to no running compilation


log = logging.getLogger(__name__)


# A MiniLM takes as long for each token in runs of 128 as of 1,024 tokens; those of 1,024 take 0.2 s (AMD EPYC, one
# thread).
TOKEN_PACKING = 1024


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The compiler options that decide which artifact a model file becomes."""

    max_batch: int
    precision: str
    threads: int
    device: str = "cpu"
    device_memory: int = 0  # bytes of the device's memory that the model may use; 0: all of it
    # The most tokens of a packed run (sequences one after the other, no padding); 0: no packing. None: `TOKEN_PACKING`
    # for models of tokens on the CPU, otherwise no packing.
    packing: int | None = None


def artifact_key(digest: str, options: BuildOptions, compiler: str) -> str:
    """Return the cache key of the artifact: model file (its sha256), options and compiler (`compiler_digest`)."""
    return hashlib.sha256(repr((digest, options, compiler)).encode()).hexdigest()


@cache
def compiler_digest_at_start() -> str:
    """Return what `compiler_digest` was at the first call (cached): the compiler that this process has imported."""
    return compiler_digest()


def compiler_digest() -> str:
    """Return a hash of the compiler and custom operators on disk, llvmlite's version, CPU features and LATHE_TARGET."""
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


def writable_cache_folder(wanted: Path) -> Path:
    """Make the folder and return it; if it cannot be written, a temporary one that is removed when the process ends."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        log.warning("the cache folder cannot be written (%s): models are compiled again at each start", error.strerror)
    temporary = Path(tempfile.mkdtemp(prefix="lathe-cache-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


class ArtifactCache:
    """The folder of artifacts; several processes may share it."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes

    @property
    def shared(self) -> Path:
        """The folder of files that several artifacts share: object code and the tuner's results."""
        return self._root / "shared"

    def open(self) -> None:
        """Make the folder, and remove work folders older than one hour: their compilations were interrupted."""
        self.shared.mkdir(parents=True, exist_ok=True)
        for work in self._root.glob("work/*"):
            if time.time() - work.stat().st_mtime > _ABANDONED:
                shutil.rmtree(work, ignore_errors=True)

    def begin(self) -> Path:
        """Make a new work folder for a compilation, and return its path; the caller removes it. Raises OSError."""
        work = self._root / "work" / secrets.token_hex(8)
        work.mkdir(parents=True, mode=0o700)
        return work

    def find(self, key: str) -> Path | None:
        """Return the artifact's folder, and note its use for `collect`; None if there is none.

        Also None if it is damaged or of another user; then it is removed.
        """
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
        """Move the folder `made` of a compilation into the cache under `key`; returns the new folder. Raises OSError.

        If another process has stored an artifact under `key` meanwhile, that one stays and is returned.
        """
        folder = self._path(key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _seal(made)
        with contextlib.suppress(OSError):
            os.rename(made, folder)  # fails if another process was faster: then its artifact is used
        found = self.find(key)
        if found is None:
            raise OSError(None, "the compiled model could not be stored")
        return found

    def drop(self, key: str) -> None:
        """Remove an artifact."""
        shutil.rmtree(self._path(key), ignore_errors=True)

    def collect(self, in_use: Collection[Path]) -> None:
        """Delete the least recently used artifacts, except those `in_use`, until the cache is within `max_bytes`."""
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
    """Return the sha256 of each file except `digests.json` by its relative path.

    Raises OSError for links, and for files and folders that another user owns or that others may write.
    """
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
