"""Reads attributes: from `AttributeProto` to attribute values, checked against the ONNX schema."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.declared_types import Symbols, value_type
from lathe.core.frontends.external import ExternalFiles
from lathe.core.frontends.tensors import sparse_array, tensor_array
from lathe.core.ir.graph import Attr, Graph
from lathe.core.ir.types import OptionalType, SequenceType, TensorType
from lathe.core.ops.opdef import registry

_Proto = onnx.AttributeProto
_SCALARS = {_Proto.FLOAT: "f", _Proto.INT: "i"}
_LISTS = {_Proto.FLOATS: "floats", _Proto.INTS: "ints"}

GraphReader = Callable[[onnx.GraphProto], Graph]


def attribute_value(
    proto: onnx.AttributeProto, read_graph: GraphReader, where: str, files: ExternalFiles | None = None
) -> Attr:
    """The value of an attribute: a number, text, an array, a graph, a type, or a tuple of numbers or texts.

    `read_graph` imports a nested graph; `files` holds the external data of tensors; `where` is for error messages.
    ModelError for a malformed tensor, type or graph; UnsupportedError for lists of tensors, graphs or types. Text that
    is not UTF-8 is returned as bytes.
    """
    where = f"{where}, attribute '{proto.name}'"
    if proto.type in _SCALARS:
        scalar: Attr = getattr(proto, _SCALARS[proto.type])
        return scalar
    if proto.type in _LISTS:
        return tuple(getattr(proto, _LISTS[proto.type]))
    match proto.type:
        case _Proto.STRING:
            return _text(proto.s)
        case _Proto.STRINGS:
            return tuple(map(_text, proto.strings))
        case _Proto.TENSOR:
            return tensor_array(proto.t, where, files)
        case _Proto.SPARSE_TENSOR:
            return sparse_array(proto.sparse_tensor, where)
        case _Proto.GRAPH:
            return read_graph(proto.g)
        case _Proto.TYPE_PROTO:
            return value_type(proto.tp, Symbols(), where)
    kind = _Proto.AttributeType.Name(proto.type) if proto.type in _Proto.AttributeType.values() else proto.type
    raise UnsupportedError(f"is of kind {kind}, expected numbers, text, a tensor, a graph or a type", where=where)


def _text(data: bytes) -> str | bytes:
    """The bytes of a text attribute decoded as UTF-8; the bytes themselves if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def check_known(op: str, attrs: Mapping[str, Attr], where: str) -> dict[str, Attr]:
    """Those of `attrs`, a node's attributes, that the registered operator `op` declares, with their values.

    ModelError for an attribute that the ONNX schema does not have, or that is of another kind. UnsupportedError for an
    attribute that Lathe does not have, unless its value is the schema's default.
    """
    definition = registry.get(op)
    known, schema = {*definition.attrs, *definition.params}, check_kinds(op, definition.domain, attrs, where)
    found: dict[str, Attr] = {}
    for name, value in attrs.items():
        if name in known:
            found[name] = value
        elif schema is None or schema[name].default != value:
            raise UnsupportedError(f"attribute '{name}' = {reprlib.repr(value)} is not supported", where=where)
    return found


def check_kinds(op: str, domain: str, attrs: Mapping[str, Attr], where: str) -> Mapping[str, _SchemaAttribute] | None:
    """Check `attrs` against the newest ONNX schema of `op`, and return the schema's attributes; None without a schema.

    The result maps each name to the kind ("INT", "FLOATS") and the default. ModelError if the schema does not have one
    of `attrs`, or has it with another kind. Without a schema, nothing is checked.
    """
    schema = _schema_attributes(op, domain)
    if schema is None:
        return None
    for name, value in attrs.items():
        if name not in schema:
            raise ModelError(f"has attribute '{name}', expected only {', '.join(schema) or 'none'}", where=where)
        if not _is_kind(value, schema[name].kind):
            raise ModelError(f"attribute '{name}' is {reprlib.repr(value)}, expected {schema[name].kind}", where=where)
    return schema


class _SchemaAttribute(NamedTuple):
    kind: str  # "INT", "FLOATS" ...
    default: Any


@functools.cache
def _schema_attributes(op: str, domain: str) -> dict[str, _SchemaAttribute] | None:
    """The kind and default of each attribute in the newest ONNX schema of `op`, by name; None if there is no schema."""
    try:
        schema = onnx.defs.get_schema(op, domain)
    except onnx.defs.SchemaError:
        return None
    attributes: dict[str, Any] = schema.attributes
    return {name: _SchemaAttribute(each.type.name, _default(each.default_value)) for name, each in attributes.items()}


_KINDS: dict[str, tuple[type, ...]] = {
    "INT": (int,),
    "FLOAT": (float, int),
    "STRING": (str, bytes),
    "TENSOR": (np.ndarray,),
    "SPARSE_TENSOR": (np.ndarray,),
    "GRAPH": (Graph,),
    "TYPE_PROTO": (TensorType, SequenceType, OptionalType),
}


def _is_kind(value: Attr, kind: str) -> bool:
    if kind in _KINDS:
        return isinstance(value, _KINDS[kind])
    item = kind.removesuffix("S")
    return isinstance(value, tuple) and all(isinstance(each, _KINDS.get(item, (object,))) for each in value)


def _default(proto: onnx.AttributeProto) -> Any:
    if not proto.name:
        return None
    value = onnx.helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else (tuple(value) if isinstance(value, list) else value)
