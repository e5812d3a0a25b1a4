"""The table of lowerings of contributed operators, and helper functions for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Attr, Value
from lathe.core.ir.types import DType

DOMAIN = "com.microsoft"

Lowering: TypeAlias = Callable[[Emitter, OnnxNode], Sequence[Value]]
_LOWERINGS: dict[tuple[str, str], Lowering] = {}


def find_lowering(domain: str, op: str) -> Lowering | None:
    """The function that lowers an operator: given a node, it emits ONNX operators and returns the node's outputs.

    None if the operator has no lowering. The function raises UnsupportedError for inputs, attributes and unknown
    extents that it does not support, and ModelError for invalid ones.
    """
    return _LOWERINGS.get((domain, op))


def lowered_operators() -> list[str]:
    """The sorted names of lowered operators of `com.microsoft`, and of those of the default domain that ONNX lacks."""
    return sorted(op for domain, op in _LOWERINGS if domain == DOMAIN or (domain == "" and not onnx.defs.has(op)))


def lowers(*ops: str, domain: str = DOMAIN) -> Callable[[Lowering], Lowering]:
    """A decorator that registers a function as the lowering of the operators `ops` of `domain`.

    `domain` is `com.microsoft` by default. It is "" for operators that files have in the default domain although ONNX
    lacks them, and for operators of ONNX whose own function body is unsuitable.
    """

    def add(lowering: Lowering) -> Lowering:
        _LOWERINGS.update({(domain, op): lowering for op in ops})
        return lowering

    return add


def emit_output(e: Emitter, node: OnnxNode, op: str, *inputs: Value | None, **attrs: Any) -> list[Value]:
    """Emit an operator that computes the first output of `node`, under its name; returns a list of that one value."""
    return e.emit(op, inputs, attrs, node.outputs[:1], node.label)


def present_attrs(node: OnnxNode, *names: str) -> dict[str, Attr]:
    """Those of the named attributes that the node has."""
    return {name: node.attrs[name] for name in names if name in node.attrs}


def refuse_attributes(node: OnnxNode, *names: str) -> None:
    """UnsupportedError if one of these attributes is set to anything but 0 or an empty value."""
    for name in names:
        if node.attrs.get(name):
            raise UnsupportedError(f"attribute '{name}' = {node.attrs[name]!r} is not supported", where=node.where)


def constant(e: Emitter, value: object, like: Value) -> Value:
    """A constant with the element type of `like`."""
    return e.constant(value, dtype=like.dtype)


def int64s(e: Emitter, *values: int) -> Value:
    """A constant int64 vector."""
    return e.constant(list(values), dtype=DType.INT64)


def emit_activation(e: Emitter, node: OnnxNode, x: Value) -> list[Value]:
    """The first output: `x` after the activation that the attribute `activation` names.

    Its parameters are `activation_params`, or `activation_alpha` and `activation_beta`. UnsupportedError for other
    activations, and if the attribute is absent.
    """
    kind: Any = node.attrs.get("activation", "")
    if kind not in _ACTIVATIONS:
        raise UnsupportedError(f"activation is {kind}, expected one of {', '.join(_ACTIVATIONS)}", where=node.where)
    names = _ACTIVATIONS[kind]
    values: Any = node.attrs.get("activation_params", ())
    params = dict(zip(names, values, strict=False))
    params |= {name: node.attrs[_PARAMETERS[name]] for name in names if _PARAMETERS.get(name) in node.attrs}
    if kind == "Clip":
        return emit_output(
            e, node, "Clip", x, *(constant(e, params[name], x) if name in params else None for name in names)
        )
    return emit_output(e, node, kind, x, **params)


_ACTIVATIONS = {
    "Clip": ("min", "max"), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Relu": (),
    "Sigmoid": (), "Softplus": (), "Softsign": (), "Tanh": (), "ThresholdedRelu": ("alpha",),
}  # fmt: skip
_PARAMETERS = {"alpha": "activation_alpha", "beta": "activation_beta"}
