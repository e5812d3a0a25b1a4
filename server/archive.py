"""What a client uploads for a model: its file as it is, or an archive where there is more than one file.

The archive is a POSIX tar of ``model.onnx`` and ``weights.bin``, the model rewritten so that all its tensors lie in the
one file of weights; or of ``pipeline.toml`` and the files that its steps read. It is put together nowhere: its bytes
come in pieces, straight from the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from server.types import Array

MODEL, WEIGHTS, PIPELINE = "model.onnx", "weights.bin", "pipeline.toml"
_BLOCK = 512
_CHUNK = 1 << 18
_LARGEST_OCTAL = 8 << 30  # bytes; a larger size is written in base 256

Part: TypeAlias = bytes | Path | Array  # an array of bytes


@dataclass(frozen=True)
class Body:
    """The content of an upload, one part after the other."""

    parts: tuple[Part, ...]
    content_type: str = "application/octet-stream"

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(map(_size, self.parts))

    def pieces(self) -> Iterator[bytes]:
        """Yield the content in order."""
        for part in self.parts:
            yield from _pieces(part)

    def sha256(self) -> bytes:
        """Return the digest, for which everything is read once."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece)
        return digest.digest()


def body_of(content: Path | bytes) -> Body:
    """Return what to upload for a model.

    A ``pipeline.toml`` goes with the files that its steps read. Raises core.errors.ModelError when the model names
    weights outside its folder, behind links, or beyond the end of their file. A file that is no model goes as it is:
    the server says what is wrong with it.
    """
    if isinstance(content, bytes):
        return Body((content,))
    if content.name == PIPELINE:
        return _pipeline(content)
    from core.errors import ModelError, UnsupportedError
    from core.frontends.fold import fold
    from core.frontends.proto import parse_model

    try:
        model = parse_model(content.read_bytes(), external=True)
    except (ModelError, UnsupportedError):
        return Body((content,))
    folded = fold(model, content, WEIGHTS)
    return Body((content,)) if folded is None else archive_of({MODEL: [folded.model], WEIGHTS: folded.weights})


def _pipeline(path: Path) -> Body:
    """Return the archive of a pipeline; raises OSError for a file that is not there."""
    from server.pipelines.definition import BadPipeline, parse

    content = path.read_bytes()
    try:
        files = {step.file for step in parse(content).step if step.file is not None}
    except BadPipeline:
        files = set()
    return archive_of({PIPELINE: [content], **{name: [path.with_name(name)] for name in sorted(files)}})


def archive_of(files: Mapping[str, Sequence[Part]]) -> Body:
    """Return the tar archive of these files, given in parts."""
    parts: list[Part] = []
    for name, content in files.items():
        size = sum(map(_size, content))
        parts += [_header(name, size), *content, bytes(-size % _BLOCK)]
    return Body((*parts, bytes(2 * _BLOCK)), "application/x-tar")


def _header(name: str, size: int) -> bytes:
    """Return the block before a file: a POSIX ustar header of a plain file without owner or time."""
    header = bytearray(_BLOCK)
    header[: len(name)] = name.encode()
    header[100:108], header[108:124] = b"0000644\0", b"0000000\0" * 2
    header[124:136] = f"{size:011o}\0".encode() if size < _LARGEST_OCTAL else (size | 1 << 95).to_bytes(12, "big")
    header[136:148], header[148:156] = b"00000000000\0", b" " * 8
    header[156:157], header[257:265] = b"0", b"ustar\x0000"
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


def _size(part: Part) -> int:
    return part.stat().st_size if isinstance(part, Path) else len(part)


def _pieces(part: Part) -> Iterator[bytes]:
    if isinstance(part, Path):
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
        return
    for start in range(0, len(part), _CHUNK):
        yield bytes(part[start : start + _CHUNK])
