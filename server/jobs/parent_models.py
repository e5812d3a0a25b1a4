"""The model versions that jobs start from, from the model repository."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from lathe.server.errors import NotFound, Unprocessable
from lathe.server.jobs.job import ModelPin
from lathe.server.repository import names
from lathe.server.repository.catalog import Catalog
from lathe.server.repository.manifest import MODEL_FILE
from lathe.server.repository.store import Store

_NO_LINK_ERRNOS = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK}


class RepositoryParents:
    """Resolves versions, and gives jobs their own links to the files, so that a version may be deleted meanwhile."""

    def __init__(self, catalog: Catalog, store: Store) -> None:
        self._catalog = catalog
        self._store = store

    async def pin(self, model: str, version: str) -> ModelPin:
        """Return the version that `version`, a number or an alias, names now.

        Raises NotFound, BadRequest for an invalid name, and Unprocessable for a version without an ONNX model or
        without a valid manifest, such as a hand-copied one that is not adopted yet.
        """
        number = self._resolve_version(names.check_model(model), version)
        manifest = (await self._catalog.version(model, number)).manifest
        if manifest is None:
            raise Unprocessable(f"version {number} of model {model!r} has not been adopted yet")
        if MODEL_FILE not in manifest.files:
            raise Unprocessable(
                f"version {number} of model {model!r} has no ONNX model, which a job could read: it is a pipeline or a "
                "language model"
            )
        return ModelPin(model, number, manifest.digest)

    def link(self, pin: ModelPin, folder: Path) -> None:
        """Put the version's files into a new folder: as hard links, since versions never change, otherwise as copies.

        Raises NotFound if the version was deleted or replaced, OSError.
        """
        source = self._store.folder(pin.name, pin.version)
        manifest = self._store.manifest(pin.name, pin.version)
        if manifest is None or manifest.digest != pin.digest:
            raise NotFound(f"model {pin.name!r} has no version {pin.version} any more")
        folder.mkdir()
        for name in manifest.files:
            _link_or_copy(source / names.check_file(name), folder / name)

    def _resolve_version(self, model: str, version: str) -> int:
        if names.is_version_number(version):
            return int(version)
        aliases = self._catalog.model(model).aliases
        if (number := aliases.version(names.check_alias(version))) is None:
            raise NotFound(f"model {model!r} has no alias {version!r}")
        return number


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        with open(source, "rb") as original, open(target, "xb") as copy:
            shutil.copyfileobj(original, copy)
            copy.flush()
            os.fsync(copy.fileno())
