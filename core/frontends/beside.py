"""Digests of the files beside a model that hold its tensors. Compiled code is valid for these contents only, so it is
found by their digests, without importing the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from core.errors import ModelError
from core.frontends.external import ExternalFiles, extent_of, is_external
from core.frontends.proto import messages

# How a tensor says that it names a file: the key of an entry, its field and its length before it. A model that says it
# in some other encoding names no file here, and is refused when it is read.
_LOCATION = b"\x0a\x08location"
_PIECE, _OVERLAP = 1 << 20, 64  # bytes


def names_files(model: bytes) -> bool:
    """Whether tensors of a model may lie in other files. A search, as most models are large and have none."""
    return model.find(_LOCATION) >= 0


def digests(model: bytes, files: ExternalFiles) -> list[str]:
    """The names and digests of the files that tensors of a model lie in, as far as they can be read. Reading the model
    names what is wrong with others."""
    if not names_files(model):
        return []
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(model)
    except DecodeError:
        return []
    tensors = (each for each in messages(proto) if isinstance(each, onnx.TensorProto) and is_external(each))
    found: dict[str, str] = {}
    for tensor in tensors:
        try:
            location = extent_of(tensor, "").location
            if location not in found:
                found[location] = files.digest(location, "")
        except ModelError:
            continue
    return [f"{digest} {location!r}" for location, digest in sorted(found.items())]


@dataclass(frozen=True)
class Content:
    """The SHA-256 digest of a model's bytes, and whether tensors may lie in other files."""

    digest: str
    names_files: bool


def content_at(path: Path) -> Content:
    """As `content_of_bytes`, a piece at a time. The file is not mapped: others may make it shorter meanwhile."""
    digest, last, outside = hashlib.sha256(), b"", False
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            outside = outside or names_files(piece) or names_files(last + piece[:_OVERLAP])
            last = piece[-_OVERLAP:]
    return Content(digest.hexdigest(), outside)


def content_of_bytes(model: bytes, known: Content | None = None, alone: bool = False) -> Content:
    """The content of a model in memory; `known` if its digest is equal, so that the bytes are not searched again.
    `alone`: there are no files beside it, so they are not searched either."""
    digest = hashlib.sha256(model).hexdigest()
    if known is not None and known.digest == digest:
        return known
    return Content(digest, not alone and names_files(model))
