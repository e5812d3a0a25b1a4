"""How datasets come, are found, and go. Nothing here knows what jobs do with them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import orjson

from server.datasets.record import Content, Named, Naming, check_name, is_digest
from server.datasets.store import DATA, Dataset, DatasetStore
from server.errors import BadRequest, Conflict, Internal, Unavailable
from server.repository.intake import blocks
from server.repository.manifest import FileEntry
from server.repository.staging import Staging
from server.repository.store import now, storage_error, storage_errors

log = logging.getLogger(__name__)

Removed: TypeAlias = frozenset[str]  # digests
Needed: TypeAlias = Callable[[], Awaitable[Collection[str]]]  # digests

_PATIENCE = 4.0  # seconds that uploads under way get when the server stops


async def _nothing() -> Collection[str]:
    return ()


class Check(Protocol):
    """Looks at a file in a child process, as :meth:`server.children.Children.run` does."""

    async def run(self, task: str, *arguments: str | Path) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Held:
    """A content that stays while it is held."""

    name: str  # what it was asked for by; its digest, if by that
    content: Content
    path: Path

    @property
    def digest(self) -> str:
        """The content's sha256."""
        return self.content.digest


class Datasets:
    """The one who changes datasets. All methods run on the event loop; the disk is used beside it."""

    def __init__(self, store: DatasetStore, check: Check, max_bytes: int) -> None:
        self._store = store
        self._check = check
        self._max_bytes = max_bytes
        self._changing = asyncio.Lock()  # a content is held or removed, not both
        self._held: Counter[str] = Counter()
        self._fault: str = "not open yet"  # why there are no datasets; empty when there are
        self._admissions: set[asyncio.Future[Dataset]] = set()
        self.needed: Needed = _nothing  # what jobs that have not ended will read

    # life

    async def open(self) -> None:
        """Finish what a crash left half done. Without a folder to write to, models are served, datasets are not."""
        try:
            await asyncio.to_thread(self._store.open)
            self._fault = ""
        except OSError as error:
            self._fault = storage_error("opening", error).message
            log.error("there are no datasets: %s", error)

    async def close(self) -> None:
        """End what is under way, and let go of the folder."""
        if self._fault:
            return
        self._fault = "closed"
        if self._admissions:
            _, late = await asyncio.wait(self._admissions, timeout=_PATIENCE)
            for admission in late:
                admission.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await asyncio.to_thread(self._store.close)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open, and close in the end."""
        await self.open()
        try:
            yield
        finally:
            await self.close()

    # what there is

    async def list(self) -> list[Dataset]:
        """Return all names with what they stand for."""
        self._check_open()
        return await asyncio.to_thread(lambda: [self._described(named) for named in self._store.names()])

    async def find(self, name: str) -> Dataset:
        """Return what a name stands for; raises NotFound."""
        self._check_open()
        return await asyncio.to_thread(lambda: self._described(self._store.named(check_name(name))))

    @asynccontextmanager
    async def hold(self, reference: str) -> AsyncIterator[Held]:
        """Keep what a name or a sha256 stands for from being removed meanwhile; raises NotFound."""
        self._check_open()
        async with self._changing:
            held = await asyncio.to_thread(self._resolve, reference)
            self._held[held.digest] += 1
        try:
            yield held
        finally:
            self._held[held.digest] -= 1

    # coming and going

    async def receive(self, name: str, stream: AsyncIterable[bytes], sha256: str | None, actor: str) -> Dataset:
        """Take an upload: receive it, look at it in a child process, and let ``name`` stand for it.

        Raises TooLarge, BadRequest for another digest than ``sha256``, Unprocessable with file, row and column where
        the data are bad, StorageFull. Nothing has changed then.
        """
        self._check_open()
        check_name(name)
        staging = await asyncio.to_thread(self._store.stage)
        try:
            with storage_errors("receiving the dataset"):
                await self._fill(staging, stream)
            entry = staging.entries[DATA]
            if sha256 is not None and sha256 != entry.sha256:
                raise BadRequest(f"Content-Digest says sha-256 {sha256}, the body received has {entry.sha256}")
        except BaseException:
            await asyncio.shield(asyncio.to_thread(staging.discard))
            raise
        admission = asyncio.ensure_future(self._admit(name, staging, entry, actor))  # to its end, if the caller leaves
        self._admissions.add(admission)
        admission.add_done_callback(self._admissions.discard)
        return await asyncio.shield(admission)

    async def remove(self, name: str, digest: str | None = None) -> Removed:
        """Forget a name, or only ``digest`` of what it stood for; returns the contents that went.

        Raises NotFound, and Conflict while a job needs one of them.
        """
        self._check_open()
        check_name(name)
        async with self._changing:
            needed = {*await self.needed(), *(held for held, times in self._held.items() if times)}
            with storage_errors("removing the dataset"):
                return await asyncio.to_thread(self._store.remove, name, digest, needed)

    # how

    def _check_open(self) -> None:
        if self._fault:
            raise Unavailable(f"datasets: {self._fault}")

    def _described(self, named: Named) -> Dataset:
        return Dataset(named, self._store.content(named.digest))

    def _resolve(self, reference: str) -> Held:
        digest = reference if is_digest(reference) else self._store.named(check_name(reference)).digest
        return Held(reference, self._store.content(digest), self._store.path(digest))

    async def _fill(self, staging: Staging, stream: AsyncIterable[bytes]) -> None:
        file = await asyncio.to_thread(staging.create, DATA)
        async for block in blocks(stream, self._max_bytes, "the dataset"):
            await asyncio.to_thread(file.write, block)
        if not staging.entries[DATA].size:
            raise BadRequest("the body is empty, expected a dataset")

    async def _admit(self, name: str, staging: Staging, entry: FileEntry, actor: str) -> Dataset:
        try:
            content = Content(entry.sha256, entry.size, await self._describe(name, staging, entry.sha256))
            naming = Naming(content.digest, now(), actor)
            with storage_errors("storing the dataset"):
                named = await asyncio.to_thread(self._store.keep, name, staging, content, naming)
            return Dataset(named, content)
        finally:
            await asyncio.to_thread(staging.discard)

    async def _describe(self, name: str, staging: Staging, digest: str) -> dict[str, Any]:
        """Look at the file in a child process, whether or not the same bytes are known: they may not be for long."""
        output = await self._check.run("describe", staging.path / DATA, "--name", name)
        try:
            description = orjson.loads(output.splitlines()[-1])
        except (orjson.JSONDecodeError, IndexError) as error:
            raise Internal("describe: expected one line of JSON from the child process") from error
        if not isinstance(description, dict) or description.get("digest", digest) != digest:
            raise Conflict("the dataset has changed on the server's disk while it was looked at")
        return description
