"""The interfaces that jobs need from other parts of the server; the implementations are passed in."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from lathe.server.jobs.job import Job, ModelPin, Publication


class HeldDataset(Protocol):
    """A dataset that is not deleted while it is held."""

    @property
    def digest(self) -> str:
        """The sha256 of the dataset, in hexadecimal."""

    @property
    def path(self) -> Path: ...


class Datasets(Protocol):
    """The uploaded datasets."""

    def hold(self, reference: str) -> AbstractAsyncContextManager[HeldDataset]:
        """Hold the dataset of a name or a sha256; entering raises NotFound."""

    async def name_of(self, reference: str) -> str:
        """Return a name of the dataset with this name or sha256; the reference itself if it has none."""


class Parents(Protocol):
    """The model versions that jobs start from."""

    async def pin(self, model: str, version: str) -> ModelPin:
        """Return the version that `version`, a number or an alias, names now; raises NotFound, Unprocessable."""

    def link(self, pin: ModelPin, folder: Path) -> None:
        """Put the version's files into a new folder, as hard links if possible; raises NotFound, OSError."""


class Publisher(Protocol):
    """Publishes results as versions."""

    async def finish(self, job: Job, folder: Path) -> Publication:
        """Publish the result in `folder/result`; idempotent per job. Raises ServerError."""
