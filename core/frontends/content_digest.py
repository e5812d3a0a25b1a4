"""Digests of a model and of the files that hold its external tensors.

Compiled code is valid for these contents only. The cache finds it by the digests, without importing the model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from lathe.core.errors import ModelError
from lathe.core.frontends.external import ExternalFiles, extent_of, is_external
from lathe.core.frontends.proto import all_messages

# The protobuf encoding of the key "location" in a tensor's external data: tag, length, text. In a model
# with another encoding of it this search finds no files; the import refuses such a model.
_LOCATION = b"\x0a\x08location"
_CHUNK, _OVERLAP = 1 << 20, 64  # bytes


def may_have_external_data(model: bytes) -> bool:
    """Whether tensors of a serialized model may lie in other files: True may be a false alarm, False is certain.

    It searches the bytes for the key `location` of external data instead of parsing them: most models are large and
    have no such tensors.
    """
    return model.find(_LOCATION) >= 0


def digests(model: bytes, files: ExternalFiles) -> list[str]:
    """A line with SHA-256 digest and relative path for each file with external data of `model`, sorted by path.

    Empty if the bytes are no model. Files that cannot be read are omitted; the import raises an error for them.
    """
    if not may_have_external_data(model):
        return []
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(model)
    except DecodeError:
        return []
    tensors = (each for each in all_messages(proto) if isinstance(each, onnx.TensorProto) and is_external(each))
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
class ModelContent:
    """The SHA-256 digest of a model's bytes, and whether tensors may lie in other files (`may_have_external_data`)."""

    digest: str
    may_have_external_data: bool


def content_of_file(path: Path) -> ModelContent:
    """The `ModelContent` of a model file, which is read in chunks of 1 MiB.

    The file is not mapped, because access to a mapping fails with SIGBUS if another process truncates the file.
    """
    digest, last, has_files = hashlib.sha256(), b"", False
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            has_files = has_files or may_have_external_data(chunk) or may_have_external_data(last + chunk[:_OVERLAP])
            last = chunk[-_OVERLAP:]
    return ModelContent(digest.hexdigest(), has_files)


def content_of_bytes(model: bytes, known: ModelContent | None = None, alone: bool = False) -> ModelContent:
    """The `ModelContent` of a model in memory.

    `known`, an earlier result, is returned if its digest is equal, so that the bytes are not searched again. `alone`
    says that the model may not use other files: then `may_have_external_data` is False without a search, unless `known`
    is returned.
    """
    digest = hashlib.sha256(model).hexdigest()
    if known is not None and known.digest == digest:
        return known
    return ModelContent(digest, not alone and may_have_external_data(model))
