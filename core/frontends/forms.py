"""Which opsets have an operator in its newest form: the way back from canonical graphs to older opsets."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import onnx

from core.errors import UnsupportedError
from core.frontends.opsets import ALWAYS, adapted_below
from core.frontends.proto import newest_opset
from core.ir.graph import Node, Value
from core.ir.types import DType, MapType, OptionalType, SequenceType, TensorType, ValueType
from core.ops import registry

_OLDEST = {"": 21}  # of the default domain: older ones gain no runtime that is still in use
_FLOAT_MOD = 28
_TYPE_NAMES = {DType.FLOAT32: "float", DType.FLOAT64: "double"}


def oldest_opset(domain: str, nodes: Sequence[Node], given: int | None = None) -> int:
    """The oldest opset of `domain` that has all `nodes` in the form they have; `given` if that does.

    UnsupportedError, naming the first node that does not fit, when none does.
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


def least_inputs(op: str, domain: str) -> int:
    """How many inputs ONNX wants to see, absent ones included."""
    schema = _schema(op, domain, newest_opset(domain))
    return 0 if schema is None else int(schema.min_input)


def _fits(node: Node, domain: str, version: int) -> bool:
    """Whether an opset knows the operator, means the same by it, and allows these attributes and types."""
    if registry.revisions([node.op]):
        return True  # an operator from outside this package: no schema knows it
    schema = _schema(node.op, domain, version)
    if schema is None or any(version < changed < ALWAYS for changed in adapted_below(node.op)):
        return False
    if version < _least(node):
        return False
    counts = len(node.inputs) <= schema.max_input and len(node.outputs) <= schema.max_output
    return (
        counts
        and node.attrs.keys() <= schema.attributes.keys()
        and _allowed(schema.inputs, node.inputs)
        and _allowed(schema.outputs, node.outputs)
    )


def _least(node: Node) -> int:
    """The first opset that allows a combination of types and attributes, where schemas do not tell: floats have a Mod
    with the sign of the divisor (`fmod` 0) since opset 28."""
    dtype = getattr(node.output.type, "dtype", None) if node.op == "Mod" else None
    return _FLOAT_MOD if isinstance(dtype, DType) and dtype.is_float and not node.attrs.get("fmod") else 0


@functools.cache
def _schema(op: str, domain: str, version: int) -> Any:
    try:
        return onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None


def _allowed(formals: Sequence[Any], values: Iterable[Value | None]) -> bool:
    """Whether the types are among those that the schema names; the last of a variadic list stands for the rest."""
    return all(
        value is None or _type_name(value.type) in _types(formals[min(index, len(formals) - 1)])
        for index, value in enumerate(values)
    )


def _types(formal: Any) -> set[str]:
    names: set[str] = formal.types
    return names


def _type_name(type_: ValueType) -> str:
    """How ONNX schemas write a type."""
    match type_:
        case TensorType(dtype):
            return f"tensor({_TYPE_NAMES.get(dtype, dtype.label)})"
        case SequenceType(element):
            return f"seq({_type_name(element)})"
        case OptionalType(element):
            return f"optional({_type_name(element)})"
        case MapType(key, element):
            return f"map({key.label},{_type_name(element)})"
