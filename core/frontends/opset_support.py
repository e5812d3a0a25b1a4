"""Finds the opsets that have operators in the form that a graph uses, for the exporter."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import onnx

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.annotations import ROWS
from lathe.core.frontends.opsets import ANY_VERSION, adapter_versions
from lathe.core.frontends.proto import newest_opset
from lathe.core.ir.graph import Node, Value
from lathe.core.ir.types import DType, MapType, OptionalType, SequenceType, TensorType, ValueType
from lathe.core.ops.opdef import registry

_OLDEST = {"": 21}  # the oldest opset tried, by domain: no runtime in use needs an older one
_FLOAT_MOD = 28  # the first opset in which Mod with fmod=0 takes floats
_TYPE_NAMES = {DType.FLOAT32: "float", DType.FLOAT64: "double"}


def oldest_opset(domain: str, nodes: Sequence[Node], given: int | None = None) -> int:
    """The oldest opset of `domain` that has all `nodes` in their present form. With `given`, only that one is tried.

    Without `given`, opsets of the default domain below 21 are not tried. UnsupportedError if there is none; it names
    the first node that does not fit the newest opset, or `given`.
    """
    newest = newest_opset(domain)
    candidates = [given] if given is not None else range(_OLDEST.get(domain, 1), newest + 1)
    for version in candidates:
        if all(_fits(node, domain, version) for node in nodes):
            return version
    last = candidates[-1]
    misfit = next(node for node in nodes if not _fits(node, domain, last))
    place = f"opset {last} of domain '{domain or 'ai.onnx'}'"
    raise UnsupportedError(f"{place} does not have it in this form", where=registry.describe(misfit))


def min_inputs(op: str, domain: str) -> int:
    """The least length of a node's list of inputs in the newest opset of `domain`; 0 if that opset lacks the operator.

    An omitted input before a required one counts, since the list has an empty name in its place.
    """
    schema = _schema(op, domain, newest_opset(domain))
    return 0 if schema is None else int(schema.min_input)


def _fits(node: Node, domain: str, version: int) -> bool:
    """Whether an opset has the node's operator with the same meaning, and allows the node's form.

    The form is its attributes, and the number and types of its inputs and outputs. Always true for a custom operator,
    which has no schema.
    """
    if registry.revisions([node.op]):
        return True  # a custom operator: there is no schema
    schema = _schema(node.op, domain, version)
    if schema is None or any(version < changed < ANY_VERSION for changed in adapter_versions(node.op)):
        return False
    if version < _first_version(node):
        return False
    are_counts_allowed = len(node.inputs) <= schema.max_input and len(node.outputs) <= schema.max_output
    return (
        are_counts_allowed
        and node.attrs.keys() - {ROWS} <= schema.attributes.keys()
        and _are_types_allowed(schema.inputs, node.inputs)
        and _are_types_allowed(schema.outputs, node.outputs)
    )


def _first_version(node: Node) -> int:
    """The first opset that allows the node's combination of types and attributes, if schemas do not describe that.

    It is 28 for Mod of floats with the sign of the divisor (`fmod` 0), and 0 for all other nodes.
    """
    dtype = getattr(node.output.type, "dtype", None) if node.op == "Mod" else None
    return _FLOAT_MOD if isinstance(dtype, DType) and dtype.is_float and not node.attrs.get("fmod") else 0


@functools.cache
def _schema(op: str, domain: str, version: int) -> Any:
    try:
        return onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None


def _are_types_allowed(formals: Sequence[Any], values: Iterable[Value | None]) -> bool:
    """Whether the schema allows the types of the values. The last formal parameter stands for further values."""
    return all(
        value is None or _type_name(value.type) in _types(formals[min(index, len(formals) - 1)])
        for index, value in enumerate(values)
    )


def _types(formal: Any) -> set[str]:
    names: set[str] = formal.types
    return names


def _type_name(type_: ValueType) -> str:
    """A type in the notation of ONNX schemas."""
    match type_:
        case TensorType(dtype):
            return f"tensor({_TYPE_NAMES.get(dtype, dtype.label)})"
        case SequenceType(element):
            return f"seq({_type_name(element)})"
        case OptionalType(element):
            return f"optional({_type_name(element)})"
        case MapType(key, element):
            return f"map({key.label},{_type_name(element)})"
