"""Bodies of functions: those a model brings along, and those that define ONNX operators in terms of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from core.errors import ModelError
from core.frontends.declared import type_proto
from core.frontends.order import bodies
from core.frontends.proto import default_domain
from core.ir.graph import Attr, Value
from core.ir.types import TensorType, symbol

MAX_CALL_DEPTH = 32
_MOST_DEFINED = 5  # the largest rank that a definition is tried with: ONNX's are of images, or of heads
_Kind = onnx.AttributeProto
_SINGLE = {_Kind.FLOAT: "f", _Kind.INT: "i", _Kind.STRING: "s"}
_MANY = {_Kind.FLOATS: "floats", _Kind.INTS: "ints", _Kind.STRINGS: "strings"}


def standard_body(
    proto: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[Value | None], attrs: Mapping[str, Attr]
) -> onnx.FunctionProto | None:
    """The function that defines an ONNX operator at the model's opsets, or None when it is a primitive.

    Some definitions depend on the types of the inputs and on the attributes, whose values are in `attrs`.
    """
    version = opsets[default_domain(proto.domain)]
    schema = _schema(proto, version)
    if schema is None:
        return None
    if schema.has_context_dependent_function:
        types = [b"" if value is None else type_proto(value.type).SerializeToString() for value in inputs]
        text = _context_dependent(schema, _resolved(proto, attrs), types, version)
    elif schema.has_function:
        text = schema.get_function_with_opset_version(version)
    else:
        return None
    return _completed(text, schema, opsets) if text else None


def bodies_by_rank(
    proto: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[Value | None], attrs: Mapping[str, Attr]
) -> dict[int, onnx.FunctionProto]:
    """The function that defines an operator for each rank that its first input may have, where that is not known."""
    x = inputs[0] if inputs else None
    if x is None or not isinstance(x.type, TensorType) or x.type.shape is not None:
        return {}
    found: dict[int, onnx.FunctionProto] = {}
    for rank in range(_MOST_DEFINED + 1):
        assumed = Value(x.name, TensorType(x.type.dtype, tuple(symbol(f"d{axis}") for axis in range(rank))))
        body = standard_body(proto, opsets, [assumed, *inputs[1:]], attrs)
        if body is not None:
            found[rank] = body
    return found


def has_definition(op: str, domain: str, version: int) -> bool:
    """Whether ONNX defines an operator of this opset by a function, for some types at least."""
    schema = _schema(onnx.NodeProto(op_type=op, domain=domain), version)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _schema(proto: onnx.NodeProto, version: int) -> Any:
    try:
        return onnx.defs.get_schema(proto.op_type, version, proto.domain)
    except onnx.defs.SchemaError:
        return None


def _context_dependent(schema: Any, proto: onnx.NodeProto, types: list[bytes], version: int) -> bytes:
    """The newest body not above `version`; the package raises on attributes its builders do not expect."""
    usable = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    try:
        text: bytes = schema.get_context_dependent_function_with_opset_version(
            max(usable, default=version), proto.SerializeToString(), types
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"the definition of {proto.op_type} does not apply: {error}", where=proto.name) from None
    return text


def _resolved(proto: onnx.NodeProto, attrs: Mapping[str, Attr]) -> onnx.NodeProto:
    """The node with the values in place of references to a function's attributes."""
    copy = onnx.NodeProto()
    copy.CopyFrom(proto)
    del copy.attribute[:]
    for attribute in proto.attribute:
        if not attribute.ref_attr_name:
            copy.attribute.append(attribute)
        elif isinstance(value := attrs.get(attribute.name), int | float | str | bytes | tuple):
            _write_attribute(copy, attribute, value)
    return copy


def _write_attribute(node: onnx.NodeProto, like: onnx.AttributeProto, value: Any) -> None:
    """Add an attribute with the name and kind of `like`. ModelError when the value is of another kind."""
    field = (_MANY if isinstance(value, tuple) else _SINGLE).get(like.type)
    if field is None:
        kind = _Kind.AttributeType.Name(like.type)
        raise ModelError(f"attribute '{like.name}' is {value!r}, expected {kind}", where=node.name)
    try:
        node.attribute.add(name=like.name, type=like.type, **{field: _encoded(value)})
    except (TypeError, ValueError) as error:
        raise ModelError(f"attribute '{like.name}' is {value!r}: {error}", where=node.name) from None


def _encoded(value: Any) -> Any:
    """Text attributes are bytes in the file."""
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    return value.encode() if isinstance(value, str) else value


def _completed(text: bytes, schema: Any, opsets: Mapping[str, int]) -> onnx.FunctionProto:
    """The function with the schema's defaults for the attributes that its nodes refer to, and the model's opsets for
    domains of which it names none (preview operators use the default one so)."""
    function = onnx.FunctionProto.FromString(text)
    named = {default_domain(entry.domain) for entry in function.opset_import}
    missing = [(domain, version) for domain, version in opsets.items() if domain not in named]
    function.opset_import.extend(onnx.helper.make_opsetid(*each) for each in missing)
    function.attribute_proto.extend(a.default_value for a in schema.attributes.values() if a.default_value.name)
    function.attribute.extend(a.name for a in schema.attributes.values() if not a.default_value.name)
    return function


class Unfolding:
    """How many nodes graphs have once the calls of model-local functions are unfolded, worked out without doing so."""

    def __init__(self, functions: Mapping[tuple[str, str, str], onnx.FunctionProto]) -> None:
        self._functions = functions
        self._sizes: dict[tuple[str, str, str], int] = {}

    def size(self, nodes: Iterable[onnx.NodeProto], depth: int = 0) -> int:
        """The nodes themselves, those of their bodies, and those of the functions they call."""
        return sum(self._size_of(node, depth) for node in nodes)

    def _size_of(self, node: onnx.NodeProto, depth: int) -> int:
        inner = sum(self.size(body.node, depth) for body in bodies(node))
        key = (default_domain(node.domain), node.op_type, node.overload)
        if key not in self._functions or depth > MAX_CALL_DEPTH:  # unfolding finds out whether it goes too deep
            return 1 + inner
        if key not in self._sizes:
            self._sizes[key] = 0
            self._sizes[key] = self.size(self._functions[key].node, depth + 1)
        return 1 + inner + self._sizes[key]


def check_attributes(function: onnx.FunctionProto, given: Mapping[str, Any], where: str) -> None:
    """ModelError for an attribute that the function does not declare."""
    declared = {*function.attribute, *(proto.name for proto in function.attribute_proto)}
    unknown = sorted(given.keys() - declared)
    if unknown:
        raise ModelError(
            f"has attribute {unknown[0]}, expected only {', '.join(sorted(declared)) or 'none'}", where=where
        )
