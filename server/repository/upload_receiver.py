"""Receives an upload: an ONNX or GGUF file or a tar archive of files, within a size limit, and hashes it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lathe.server.archive import GGUF_MAGIC, foreign_format
from lathe.server.errors import BadRequest, TooLarge, UnsupportedMedia
from lathe.server.repository.manifest import GGUF_FILE, MODEL_FILE, content_digest
from lathe.server.repository.staging import Staging
from lathe.server.repository.store import Store, storage_errors
from lathe.server.repository.tar_unpacker import TarUnpacker, is_archive

if TYPE_CHECKING:
    from hashlib import _Hash as Digest

_BLOCK = 1 << 20  # bytes gathered before a write
_SHA256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?=,|$)")


@dataclass(frozen=True, slots=True)
class Upload:
    """The received files in their staging folder, and the digest of their content (see `content_digest`)."""

    staging: Staging
    digest: str


class BodyWriter(Protocol):
    """Writes a request body to files. Calls come from worker threads, one at a time."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """Check the end of the body; raises BadRequest if the body is incomplete or holds no valid version."""
        ...


class ModelWriter:
    """Writes the body as the model file."""

    def __init__(self, staging: Staging, name: str) -> None:
        self._file = staging.create(name)

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def finish(self) -> None:
        """Do nothing: a raw file has no length to check."""


def parse_content_digest(header: str) -> str:
    """Return the sha256, in hexadecimal, of a Content-Digest header (RFC 9530); raises BadRequest."""
    found = _SHA256.search(header)
    if found is None:
        raise BadRequest("Content-Digest: expected sha-256=:<base64 of 32 bytes>:")
    return base64.b64decode(found[1]).hex()


async def receive_upload(store: Store, stream: AsyncIterable[bytes], max_bytes: int, sha256: str | None) -> Upload:
    """Write the files of a version to a new staging folder.

    A body that is no tar archive becomes the ONNX or GGUF file unchecked. Raises TooLarge beyond `max_bytes`,
    UnsupportedMedia for a body that begins like another known format (zip, gzip, pickle, JSON ...), BadRequest if it is
    empty, no valid archive, or its digest is not `sha256`, StorageFull, QuotaExceeded or Unavailable. After an error
    the staging folder is removed; otherwise the caller must discard it.
    """
    staging = await asyncio.to_thread(store.stage)
    try:
        with storage_errors("receiving the model file"):
            found = await _fill(staging, stream, max_bytes)
        if sha256 is not None and sha256 != found:
            raise BadRequest(f"Content-Digest says sha-256 {sha256}, the body received has {found}")
    except BaseException:
        await asyncio.shield(asyncio.to_thread(staging.discard))
        raise
    return Upload(staging, content_digest(staging.entries))


async def _fill(staging: Staging, stream: AsyncIterable[bytes], max_bytes: int) -> str:
    """Write the body to files; returns its sha256 in hexadecimal."""
    digest, writer = hashlib.sha256(), None
    async for block in blocks(stream, max_bytes, "the model file"):
        if writer is None:
            writer = await asyncio.to_thread(_writer, staging, block, max_bytes)
        await asyncio.to_thread(_write, writer, digest, block)
    if writer is None:
        raise BadRequest("the body is empty, expected a raw ONNX file")
    await asyncio.to_thread(writer.finish)
    return digest.hexdigest()


async def blocks(stream: AsyncIterable[bytes], max_bytes: int, what: str) -> AsyncIterator[bytes]:
    """Yield a body in blocks of 1 MiB or more, except the last; raises TooLarge, naming `what`, above `max_bytes`."""
    block, size = bytearray(), 0
    async for chunk in stream:
        block += chunk
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge(f"{what} is larger than {max_bytes} bytes")
        if len(block) >= _BLOCK:
            yield bytes(block)
            block = bytearray()
    if block:
        yield bytes(block)


def _writer(staging: Staging, start: bytes, max_bytes: int) -> BodyWriter:
    """Return the writer for a body that begins with `start`; raises UnsupportedMedia for a known other format."""
    if what := foreign_format(start):
        raise UnsupportedMedia(f"the body is {what}, expected a raw ONNX file")
    if is_archive(start):
        return TarUnpacker(staging.create, max_bytes)
    return ModelWriter(staging, GGUF_FILE if start.startswith(GGUF_MAGIC) else MODEL_FILE)


def _write(writer: BodyWriter, digest: Digest, block: bytes) -> None:
    digest.update(block)
    writer.write(block)
