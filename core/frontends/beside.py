"""Digests of the files beside a model that hold its tensors. Compiled code is valid for these contents only, so it is
found by their digests, without importing the model."""

from __future__ import annotations

import onnx
from google.protobuf.message import DecodeError

from core.errors import ModelError
from core.frontends.external import ExternalFiles, extent_of, is_external
from core.frontends.proto import messages

# How a tensor says that it names a file: the key of an entry, its field and its length before it. A model that says it
# in some other encoding names no file here, and is refused when it is read.
_LOCATION = b"\x0a\x08location"


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
