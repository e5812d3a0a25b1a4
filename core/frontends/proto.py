"""From bytes to a checked `ModelProto`: all checks that are possible before the import.

Nothing here opens other files. External data (see external.py) is refused in every tensor of the file, unless the
caller permits it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import onnx
from google.protobuf.message import DecodeError, Message

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.external import is_external

NEWEST_OPSET: int = onnx.defs.onnx_opset_version()
LARGEST_OPSET = (1 << 31) - 1  # of other domains: the largest version that ONNX's schema look-up takes
NEWEST_IR: int = onnx.IR_VERSION
_MAX_ATTRIBUTES = 1000  # operators have tens: more are no valid model
_IR_WITH_OPSETS = 3  # files of older IR versions import no opset and mean opset 1


def parse_model(data: bytes, external: bool = False) -> onnx.ModelProto:
    """Parse the model in `data` and check all messages of the file (`check_messages`). ModelError if it is malformed.

    UnsupportedError for an unknown IR version. `external` permits tensors whose data lies in other files.
    """
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError) as error:
        raise ModelError(f"the {len(data)} bytes are not an ONNX model: {_reason(error)}") from None
    if not model.HasField("graph"):
        raise ModelError(f"the {len(data)} bytes hold no ONNX graph")
    if not 1 <= model.ir_version <= NEWEST_IR:
        raise UnsupportedError(f"ir_version is {model.ir_version}, expected 1 to {NEWEST_IR}")
    check_messages(model, external)
    return model


def opset_versions(model: onnx.ModelProto) -> dict[str, int]:
    """The opset that the model imports for each domain; "" is the default domain. ModelError if it imports none.

    A model whose IR version is older than opset imports, and that has none, imports opset 1 of the default domain.
    Other errors as in `read_opsets`.
    """
    if not model.opset_import and model.ir_version < _IR_WITH_OPSETS:
        return {"": 1}
    versions = read_opsets(model.opset_import, "model")
    if not versions:
        raise ModelError("the model imports no opset, expected at least the default domain")
    return versions


def read_opsets(imports: Any, where: str) -> dict[str, int]:
    """The opset for each domain, from the imports of a model or function.

    ModelError for a domain with two versions, or a version out of range; UnsupportedError for an unknown version of the
    default domain.
    """
    versions: dict[str, int] = {}
    for entry in imports:
        domain = default_domain(entry.domain)
        if versions.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"opset '{domain}' is imported as {versions[domain]} and {entry.version}", where=where)
        if domain == "" and not 1 <= entry.version <= NEWEST_OPSET:
            raise UnsupportedError(f"opset is {entry.version}, expected 1 to {NEWEST_OPSET}", where=where)
        if not 1 <= entry.version <= LARGEST_OPSET:
            raise ModelError(
                f"opset '{domain}' is of version {entry.version}, expected 1 to {LARGEST_OPSET}", where=where
            )
    return versions


def newest_opset(domain: str) -> int:
    """The newest opset of the default domain or ai.onnx.ml; 1 for every other domain."""
    if domain == "ai.onnx.ml":
        return int(onnx.defs.onnx_ml_opset_version())
    return NEWEST_OPSET if default_domain(domain) == "" else 1


def default_domain(domain: str) -> str:
    """`domain` itself, but "" for "ai.onnx": both are names of the default domain."""
    return "" if domain == "ai.onnx" else domain


def function_table(model: onnx.ModelProto) -> Mapping[tuple[str, str, str], onnx.FunctionProto]:
    """The model-local functions by (domain, name, overload). ModelError if two have the same key."""
    table: dict[tuple[str, str, str], onnx.FunctionProto] = {}
    for function in model.functions:
        key = (default_domain(function.domain), function.name, function.overload)
        if key in table:
            raise ModelError(f"function '{function.name}' of domain '{function.domain}' is defined twice")
        table[key] = function
    return table


def check_messages(model: Message, external: bool = False) -> None:
    """Check every protobuf message of the file, including subgraphs, functions and training information.

    ModelError for external data unless `external` is true, for text that is not UTF-8, and for nodes with more than
    1000 attributes.
    """
    for message in all_messages(model):
        for name in _fields(message.DESCRIPTOR).texts:
            _check_text(getattr(message, name), name, message)
        if not external and isinstance(message, onnx.TensorProto) and is_external(message):
            raise ModelError("has external data, expected its data inside the file", where=f"tensor '{message.name}'")
        if isinstance(message, onnx.NodeProto) and len(message.attribute) > _MAX_ATTRIBUTES:
            count = f"has {len(message.attribute)} attributes, expected at most {_MAX_ATTRIBUTES}"
            raise ModelError(count, where=f"node '{message.name}' ({message.op_type})")


def _check_text(value: Any, name: str, message: Message) -> None:
    """ModelError if a string field is not UTF-8; protobuf returns bytes for it."""
    if isinstance(value, bytes) or (not isinstance(value, str) and any(isinstance(item, bytes) for item in value)):
        raise ModelError(f"field '{name}' of a {message.DESCRIPTOR.name} is not UTF-8 text")


def all_messages(root: Message) -> Iterator[Message]:
    """Yield `root` and every message inside it."""
    stack = [root]
    while stack:
        message = stack.pop()
        yield message
        for name, repeated in _fields(message.DESCRIPTOR).messages:
            if repeated:
                stack.extend(getattr(message, name))
            elif message.HasField(name):
                stack.append(getattr(message, name))


class _Fields(NamedTuple):
    messages: tuple[tuple[str, bool], ...]  # (name, repeated)
    texts: tuple[str, ...]


@functools.cache
def _fields(descriptor: Any) -> _Fields:
    """The names of a message type's fields that hold messages (and whether they are repeated), and of text fields."""
    messages = tuple((field.name, field.is_repeated) for field in descriptor.fields if field.message_type is not None)
    return _Fields(messages, tuple(field.name for field in descriptor.fields if field.type == field.TYPE_STRING))


def _reason(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__
