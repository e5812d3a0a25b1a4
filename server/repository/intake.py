"""Receives an upload: bounded, digested on the way, and nothing but a raw ONNX file."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterable
from dataclasses import dataclass

from server.errors import BadRequest, TooLarge, UnsupportedMedia
from server.repository.manifest import MODEL_FILE, FileEntry
from server.repository.staging import StagedFile, Staging
from server.repository.store import Store, storage_errors

_BLOCK = 1 << 20  # bytes gathered before a write
_SHA256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?=,|$)")
_FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"\x1f\x8b": "a gzip stream",
    b"BZh": "a bzip2 stream",
    b"\xfd7zXZ": "an xz stream",
    b"\x28\xb5\x2f\xfd": "a zstandard stream",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x89HDF": "an HDF5 file",
    b"\x7fELF": "a program",
    b"--": "a multipart form",
    b"{": "JSON",
}


@dataclass(frozen=True, slots=True)
class Upload:
    """A received model file in its staging folder."""

    staging: Staging
    entry: FileEntry


def parse_content_digest(header: str) -> str:
    """Return the sha256, in hexadecimal, of a Content-Digest header (RFC 9530); raises BadRequest."""
    found = _SHA256.search(header)
    if found is None:
        raise BadRequest("Content-Digest: expected sha-256=:<base64 of 32 bytes>:")
    return base64.b64decode(found[1]).hex()


async def receive(store: Store, stream: AsyncIterable[bytes], max_bytes: int, sha256: str | None) -> Upload:
    """Write a model file to a fresh staging folder.

    Raises TooLarge beyond ``max_bytes``, UnsupportedMedia for what is no raw ONNX file, BadRequest when the content
    is empty or its digest is not ``sha256``, StorageFull. Nothing stays behind then.
    """
    staging = await asyncio.to_thread(store.stage)
    try:
        with storage_errors("receiving the model file"):
            file = await asyncio.to_thread(staging.create, MODEL_FILE)
            await _fill(file, stream, max_bytes)
        _check(file.entry, sha256)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(staging.discard))
        raise
    return Upload(staging, file.entry)


async def _fill(file: StagedFile, stream: AsyncIterable[bytes], max_bytes: int) -> None:
    block, size = bytearray(), 0
    async for chunk in stream:
        block += chunk
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge(f"the model file is larger than {max_bytes} bytes")
        if len(block) >= _BLOCK:
            await _write(file, block)
            block = bytearray()
    await _write(file, block)


async def _write(file: StagedFile, block: bytearray) -> None:
    if file.entry.size == 0:
        _check_start(bytes(block[:8]))
    await asyncio.to_thread(file.write, bytes(block))


def _check_start(start: bytes) -> None:
    for magic, what in _FOREIGN.items():
        if start.startswith(magic):
            raise UnsupportedMedia(f"the body is {what}, expected a raw ONNX file")


def _check(entry: FileEntry, sha256: str | None) -> None:
    if entry.size == 0:
        raise BadRequest("the body is empty, expected a raw ONNX file")
    if sha256 is not None and sha256 != entry.sha256:
        raise BadRequest(f"Content-Digest says sha-256 {sha256}, the body received has {entry.sha256}")
