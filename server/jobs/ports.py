"""What the job service needs of its neighbours. They are handed in, so nothing here imports them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from server.jobs.job import Finished, Job, ModelPin


class HeldDataset(Protocol):
    """Data that will not go while it is held."""

    @property
    def digest(self) -> str:
        """Its sha256, in hexadecimal."""

    @property
    def path(self) -> Path: ...


class Datasets(Protocol):
    """The uploaded data."""

    def hold(self, reference: str) -> AbstractAsyncContextManager[HeldDataset]:
        """Hold what a name or a sha256 stands for; raises NotFound on entering."""


class Parents(Protocol):
    """The versions that jobs start from."""

    async def pin(self, model: str, version: str) -> ModelPin:
        """Return the version that a number or an alias names now; raises NotFound."""

    def link(self, pin: ModelPin, folder: Path) -> None:
        """Put the version's files into a folder, without a copy where the disk allows; raises NotFound, OSError."""


class Publisher(Protocol):
    """Makes results versions."""

    async def finish(self, job: Job, folder: Path) -> Finished:
        """Publish the result in ``folder/result``, once however often it is called; raises ServerError."""
