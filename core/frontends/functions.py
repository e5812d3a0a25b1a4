"""Function bodies: model-local functions, and the functions by which ONNX defines operators in terms of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from lathe.core.errors import ModelError
from lathe.core.frontends.declared_types import type_proto
from lathe.core.frontends.node_order import bodies
from lathe.core.frontends.proto import default_domain
from lathe.core.ir.graph import Attr, Value
from lathe.core.ir.types import TensorType, symbol

MAX_CALL_DEPTH = 32
_MAX_RANK = 5  # the largest rank that is tried for a definition: those of ONNX take images, or attention heads
_Kind = onnx.AttributeProto
_SINGLE = {_Kind.FLOAT: "f", _Kind.INT: "i", _Kind.STRING: "s"}
_MANY = {_Kind.FLOATS: "floats", _Kind.INTS: "ints", _Kind.STRINGS: "strings"}


def standard_body(
    proto: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[Value | None], attrs: Mapping[str, Attr]
) -> onnx.FunctionProto | None:
    """The function by which ONNX defines the operator of a node at the model's `opsets`, by domain.

    Some definitions depend on the types of the inputs and on the attributes, whose values are in `attrs`. ModelError if
    the definition does not apply to them. None if ONNX does not know the operator, or gives no function for it with
    these types.
    """
    version = opsets[default_domain(proto.domain)]
    schema = _schema(proto, version)
    if schema is None:
        return None
    if schema.has_context_dependent_function:
        types = [b"" if value is None else type_proto(value.type).SerializeToString() for value in inputs]
        text = _context_dependent_body(schema, _resolve_references(proto, attrs), types, version)
    elif schema.has_function:
        text = schema.get_function_with_opset_version(version)
    else:
        return None
    return _complete(text, schema, opsets) if text else None


def bodies_by_rank(
    proto: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[Value | None], attrs: Mapping[str, Attr]
) -> dict[int, onnx.FunctionProto]:
    """The functions that define an operator, by rank of its first input: for each rank from 0 to 5 that has one.

    Empty if that rank is known already, or if the first input is absent or no tensor. ModelError as in `standard_body`.
    """
    x = inputs[0] if inputs else None
    if x is None or not isinstance(x.type, TensorType) or x.type.shape is not None:
        return {}
    found: dict[int, onnx.FunctionProto] = {}
    for rank in range(_MAX_RANK + 1):
        assumed = Value(x.name, TensorType(x.type.dtype, tuple(symbol(f"d{axis}") for axis in range(rank))))
        body = standard_body(proto, opsets, [assumed, *inputs[1:]], attrs)
        if body is not None:
            found[rank] = body
    return found


def has_definition(op: str, domain: str, version: int) -> bool:
    """Whether ONNX defines an operator of this opset by a function, at least for some types."""
    schema = _schema(onnx.NodeProto(op_type=op, domain=domain), version)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _schema(proto: onnx.NodeProto, version: int) -> Any:
    try:
        return onnx.defs.get_schema(proto.op_type, version, proto.domain)
    except onnx.defs.SchemaError:
        return None


def _context_dependent_body(schema: Any, proto: onnx.NodeProto, types: list[bytes], version: int) -> bytes:
    """The serialized FunctionProto of an operator whose definition depends on its input types, for opset `version`.

    ModelError if the onnx package raises, as it does for attributes that its function builders do not expect.
    """
    usable = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    try:
        text: bytes = schema.get_context_dependent_function_with_opset_version(
            max(usable, default=version), proto.SerializeToString(), types
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"the definition of {proto.op_type} does not apply: {error}", where=proto.name) from None
    return text


def _resolve_references(proto: onnx.NodeProto, attrs: Mapping[str, Attr]) -> onnx.NodeProto:
    """A copy of the node in which the values in `attrs` replace references to attributes of the enclosing function.

    A reference without such a value is dropped.
    """
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
    """Add an attribute with the name and kind of `like` to `node`. ModelError if the value is of another kind."""
    field = (_MANY if isinstance(value, tuple) else _SINGLE).get(like.type)
    if field is None:
        kind = _Kind.AttributeType.Name(like.type)
        raise ModelError(f"attribute '{like.name}' is {value!r}, expected {kind}", where=node.name)
    try:
        node.attribute.add(name=like.name, type=like.type, **{field: _encode_text(value)})
    except (TypeError, ValueError) as error:
        raise ModelError(f"attribute '{like.name}' is {value!r}: {error}", where=node.name) from None


def _encode_text(value: Any) -> Any:
    """The value as `AttributeProto` stores it: text as bytes, tuples as lists."""
    if isinstance(value, tuple):
        return [_encode_text(item) for item in value]
    return value.encode() if isinstance(value, str) else value


def _complete(text: bytes, schema: Any, opsets: Mapping[str, int]) -> onnx.FunctionProto:
    """Parse a serialized function body, and add what ONNX leaves out: the schema's attributes, and opset imports.

    Attributes get the schema's defaults. The model's opset is added for each domain of which the function imports none:
    functions of preview operators use the default domain without an import.
    """
    function = onnx.FunctionProto.FromString(text)
    named = {default_domain(entry.domain) for entry in function.opset_import}
    missing = [(domain, version) for domain, version in opsets.items() if domain not in named]
    function.opset_import.extend(onnx.helper.make_opsetid(*each) for each in missing)
    function.attribute_proto.extend(a.default_value for a in schema.attributes.values() if a.default_value.name)
    function.attribute.extend(a.name for a in schema.attributes.values() if not a.default_value.name)
    return function


class InlinedSize:
    """Counts the nodes of graphs after the calls of model-local functions are inlined, without inlining them."""

    def __init__(self, functions: Mapping[tuple[str, str, str], onnx.FunctionProto]) -> None:
        self._functions = functions
        self._sizes: dict[tuple[str, str, str], int] = {}

    def size(self, nodes: Iterable[onnx.NodeProto], depth: int = 0) -> int:
        """The number of `nodes`, plus the nodes of their bodies and of the functions that they call.

        `depth` is the number of functions that call each other around them. A call deeper than `MAX_CALL_DEPTH`, which
        the importer refuses, counts as one node, and so does a call of a function inside itself.
        """
        return sum(self._node_size(node, depth) for node in nodes)

    def _node_size(self, node: onnx.NodeProto, depth: int) -> int:
        inner = sum(self.size(body.node, depth) for body in bodies(node))
        key = (default_domain(node.domain), node.op_type, node.overload)
        if key not in self._functions or depth > MAX_CALL_DEPTH:  # the importer refuses deeper calls
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
