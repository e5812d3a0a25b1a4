"""The compile cache: object code, whole compiled models, findings of the tuner.

    <root>/objects/*.o       see codegen/object_cache.py
    <root>/models/*.lathe    bundles, named by the digest of model file, options, target and compiler
    <root>/tuning/*.json     see compiler/tuner.py

All files can be deleted at any time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lathe.core.codegen.object_cache import ObjectCache, Quota, make_private_folder
from lathe.core.errors import ArtifactError

_OBJECT_BYTES = 1 << 30
_MODEL_BYTES = 8 << 30


class Store:
    """One cache folder with object code, compiled models and findings. Several processes may share it."""

    def __init__(self, root: Path) -> None:
        """Create the folder, unless it exists; errors are those of `make_private_folder`.

        Files of an existing folder to which this user may not write are used, and none are added.
        """
        self.root = root
        self.objects = ObjectCache(root / "objects", _OBJECT_BYTES)
        self._models = root / "models"
        make_private_folder(self._models)
        self._quota = Quota(self._models, "*.lathe", _MODEL_BYTES)

    def model(self, key: str) -> Path:
        """The path of the compiled model of this key, which may not exist yet."""
        return self._models / f"{key}.lathe"

    def used(self, path: Path) -> None:
        """Note that a model was used, as its file's modification time: least recently used ones are deleted first."""
        with suppress(OSError):
            os.utime(path)

    def added(self, path: Path) -> None:
        """Note that a model was written, and delete the least recently used ones if a scan finds more than 8 GiB.

        `Quota` says when there is a scan. OSError if the file does not exist.
        """
        self._quota.added(path.stat().st_size)

    @property
    def tuning_folder(self) -> Path:
        """The folder of the tuner's findings."""
        return self.root / "tuning"


def cache_dir(environ: Mapping[str, str] = os.environ) -> str | None:
    """The cache folder that the environment names; None if it names none.

    The variable is `LATHE_CACHE_DIR`. If it is missing or empty, its older name `LATHE_CACHE` counts.
    """
    return environ.get("LATHE_CACHE_DIR") or environ.get("LATHE_CACHE") or None


_stores: dict[Path, Store] = {}
_stores_lock = threading.Lock()


def open_store(folder: str | None, environ: Mapping[str, str] = os.environ) -> Store | None:
    """The store in `folder`, by default in that of the environment (`cache_dir`) or in the user's cache.

    There is one object per folder and process. None if the default folder, that of the environment or the user, cannot
    be created or is not private, as in a read-only container. For such a `folder`, the errors of `Store`.
    """
    users = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(folder or cache_dir(environ) or users / "lathe")
    with _stores_lock:
        try:
            if path not in _stores:
                _stores[path] = Store(path)
            return _stores[path]
        except (OSError, ArtifactError):
            if folder is not None:
                raise
            return None
