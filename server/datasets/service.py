"""Uploads, finds, holds and removes datasets; independent of jobs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import orjson

from lathe.server.datasets.records import Content, DatasetName, NameEntry, check_name, is_digest
from lathe.server.datasets.store import DATA, Dataset, DatasetStore
from lathe.server.errors import BadRequest, Conflict, Internal, NotFound, ServerError, Unavailable
from lathe.server.repository.manifest import FileEntry
from lathe.server.repository.staging import Staging
from lathe.server.repository.store import now_rfc3339, storage_error, storage_errors
from lathe.server.repository.upload_receiver import blocks

log = logging.getLogger(__name__)

Removed: TypeAlias = frozenset[str]  # digests
NeededDigests: TypeAlias = Callable[[], Awaitable[Collection[str]]]  # digests

_STOP_TIMEOUT = 4.0  # seconds that running uploads get when the server stops


async def _no_digests() -> Collection[str]:
    return ()


class Check(Protocol):
    """Runs a task on a file in a child process, like `lathe.server.processes.stage_children.Children.run`."""

    async def run(self, task: str, *arguments: str | Path) -> bytes: ...


@dataclass(frozen=True, slots=True)
class HeldContent:
    """A content that is not removed while it is held."""

    name: str  # the reference that was asked for: a name or a digest
    content: Content
    path: Path

    @property
    def digest(self) -> str:
        """The content's sha256."""
        return self.content.digest


class Datasets:
    """The only writer of datasets. All methods run on the event loop; disk accesses run on threads.

    Before `open` has succeeded and after `close`, all other methods but `name_of` raise Unavailable. They also raise it
    if the record of a name or content is damaged or cannot be read.
    """

    def __init__(self, store: DatasetStore, check: Check, max_bytes: int) -> None:
        self._store = store
        self._check = check
        self._max_bytes = max_bytes
        self._lock = asyncio.Lock()  # serializes holding and removing of contents
        self._held: Counter[str] = Counter()
        self._unavailable_reason: str = "not open yet"  # why datasets are unavailable; empty if they are available
        self._admissions: set[asyncio.Future[Dataset]] = set()
        self.needed_digests: NeededDigests = _no_digests  # digests that unfinished jobs need

    # open and close

    async def open(self) -> None:
        """Open the store, and recover it after a crash.

        If its folder cannot be written, or another process keeps it locked, the error is logged, and only datasets are
        unavailable, until the server is started again.
        """
        try:
            await asyncio.to_thread(self._store.open)
            self._unavailable_reason = ""
        except (OSError, ServerError) as error:
            refusal = storage_error("opening", error) if isinstance(error, OSError) else error
            self._unavailable_reason = refusal.message
            log.error("datasets are not available: %s", error)

    async def close(self) -> None:
        """Wait up to 4 seconds for received uploads to be checked and stored, cancel the rest, and close the store."""
        if self._unavailable_reason:
            return
        self._unavailable_reason = "closed"
        if self._admissions:
            _, unfinished = await asyncio.wait(self._admissions, timeout=_STOP_TIMEOUT)
            for admission in unfinished:
                admission.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        await asyncio.to_thread(self._store.close)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A context manager that opens the datasets and, when it is left, closes them."""
        await self.open()
        try:
            yield
        finally:
            await self.close()

    # reading

    async def list(self) -> list[Dataset]:
        """Return all names, sorted, each with its present content.

        Damaged records of names are omitted, and names that are removed meanwhile.
        """
        self._check_open()
        with storage_errors("reading the datasets"):
            return await asyncio.to_thread(lambda: list(self._present()))

    async def find(self, name: str) -> Dataset:
        """Return the dataset of a name; raises NotFound, BadRequest for text that cannot be a name."""
        self._check_open()
        with storage_errors("reading the dataset"):
            return await asyncio.to_thread(lambda: self._with_content(self._store.named(check_name(name))))

    @asynccontextmanager
    async def hold(self, reference: str) -> AsyncIterator[HeldContent]:
        """A context manager that holds the content of a name or a sha256: `remove` does not remove it inside.

        Raises NotFound, and BadRequest for text that can be neither.
        """
        self._check_open()
        async with self._lock:
            with storage_errors("reading the dataset"):
                held = await asyncio.to_thread(self._resolve, reference)
            self._held[held.digest] += 1
        try:
            yield held
        finally:
            self._held[held.digest] -= 1

    async def name_of(self, reference: str) -> str:
        """Return a name for a reference: that of a sha256 is the name which its content was given last.

        A reference that is a name, or a sha256 without a name, is returned unchanged.
        """
        with storage_errors("reading the datasets"):
            return await asyncio.to_thread(self._last_name, reference) if is_digest(reference) else reference

    # changes

    async def receive(self, name: str, stream: AsyncIterable[bytes], sha256: str | None, actor: str) -> Dataset:
        """Receive an upload, check it in a child process, and move `name` to it.

        Raises TooLarge, BadRequest for an invalid name, an empty body or another digest than `sha256` (None: any),
        Unprocessable with file, row and column of invalid data, StorageFull, Overloaded if too many uploads wait, or
        another ServerError. After an error the name is unchanged. Once the body is received, check and storing go on
        even if the caller is cancelled.
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
        admission = asyncio.ensure_future(
            self._check_and_store(name, staging, entry, actor)
        )  # runs to its end even if the caller is cancelled
        self._admissions.add(admission)
        admission.add_done_callback(self._admissions.discard)
        return await asyncio.shield(admission)

    async def remove(self, name: str, digest: str | None = None) -> Removed:
        """Remove a name, or only `digest` from its history; returns the digests of the contents removed with it.

        Contents in the histories of other names stay. Raises NotFound, BadRequest for an invalid name, and Conflict if
        one of the contents is held or an unfinished job needs it.
        """
        self._check_open()
        check_name(name)
        async with self._lock:
            needed = {*await self.needed_digests(), *(held for held, times in self._held.items() if times)}
            with storage_errors("removing the dataset"):
                return await asyncio.to_thread(self._store.remove, name, digest, needed)

    # details

    def _check_open(self) -> None:
        if self._unavailable_reason:
            raise Unavailable(f"datasets: {self._unavailable_reason}")

    def _present(self) -> Iterator[Dataset]:
        for named in self._store.names():
            with suppress(NotFound):  # removed since
                yield self._with_content(named)

    def _with_content(self, named: DatasetName) -> Dataset:
        return Dataset(named, self._store.content(named.digest))

    def _resolve(self, reference: str) -> HeldContent:
        digest = reference if is_digest(reference) else self._store.named(check_name(reference)).digest
        return HeldContent(reference, self._store.content(digest), self._store.path(digest))

    def _last_name(self, digest: str) -> str:
        namings = [
            (naming.time, named.name)
            for named in self._store.names()
            for naming in named.history
            if naming.digest == digest
        ]
        return max(namings)[1] if namings else digest

    async def _fill(self, staging: Staging, stream: AsyncIterable[bytes]) -> None:
        file = await asyncio.to_thread(staging.create, DATA)
        async for block in blocks(stream, self._max_bytes, "the dataset"):
            await asyncio.to_thread(file.write, block)
        if not staging.entries[DATA].size:
            raise BadRequest("the body is empty, expected a dataset")

    async def _check_and_store(self, name: str, staging: Staging, entry: FileEntry, actor: str) -> Dataset:
        try:
            content = Content(entry.sha256, entry.size, await self._describe(name, staging, entry.sha256))
            naming = NameEntry(content.digest, now_rfc3339(), actor)
            with storage_errors("storing the dataset"):
                named = await asyncio.to_thread(self._store.keep, name, staging, content, naming)
            return Dataset(named, content)
        finally:
            await asyncio.to_thread(staging.discard)

    async def _describe(self, name: str, staging: Staging, digest: str) -> dict[str, Any]:
        """Return the description of the staged file, made in a child process; Conflict if its digest is not `digest`.

        It is made even if the content is stored already, because that may be removed meanwhile.
        """
        output = await self._check.run("describe", staging.path / DATA, "--name", name)
        try:
            description = orjson.loads(output.splitlines()[-1])
        except (orjson.JSONDecodeError, IndexError) as error:
            raise Internal("describe: expected one line of JSON from the child process") from error
        if not isinstance(description, dict) or description.get("digest", digest) != digest:
            raise Conflict("the dataset has changed on the server's disk while it was checked")
        return description
