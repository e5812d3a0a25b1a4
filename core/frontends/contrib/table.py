"""The table of contributed operators, and what their lowerings share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx

from core.errors import UnsupportedError
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Attr, Value
from core.ir.types import DType

DOMAIN = "com.microsoft"

Lowering: TypeAlias = Callable[[Emitter, OnnxNode], Sequence[Value]]
_LOWERINGS: dict[tuple[str, str], Lowering] = {}


def find_lowering(domain: str, op: str) -> Lowering | None:
    """What emits the ONNX form of a contributed operator, and returns the values of its outputs."""
    return _LOWERINGS.get((domain, op))


def lowered() -> list[str]:
    """The contributed operators that have a lowering, sorted; a few that ONNX lacks stand in its own domain."""
    return sorted(op for domain, op in _LOWERINGS if domain == DOMAIN or (domain == "" and not onnx.defs.has(op)))


def lowers(*ops: str, domain: str = DOMAIN) -> Callable[[Lowering], Lowering]:
    """Decorator: the lowering of these operators. Those of the default domain are operators that ONNX lacks, or for
    which the function body that it has will not do."""

    def add(lowering: Lowering) -> Lowering:
        _LOWERINGS.update({(domain, op): lowering for op in ops})
        return lowering

    return add


def last(e: Emitter, node: OnnxNode, op: str, *inputs: Value | None, **attrs: Any) -> list[Value]:
    """The node that gives the first output its name."""
    return e.emit(op, inputs, attrs, node.outputs[:1], node.label)


def kept(node: OnnxNode, *names: str) -> dict[str, Attr]:
    """The attributes of these names, as far as the node has them."""
    return {name: node.attrs[name] for name in names if name in node.attrs}


def refuse(node: OnnxNode, *names: str) -> None:
    """UnsupportedError when one of these attributes is set."""
    for name in names:
        if node.attrs.get(name):
            raise UnsupportedError(f"attribute '{name}' = {node.attrs[name]!r} is not supported", where=node.where)


def constant(e: Emitter, value: object, like: Value) -> Value:
    """A constant of the element type of another value."""
    return e.constant(value, dtype=like.dtype)


def int64s(e: Emitter, *values: int) -> Value:
    """A vector of integers."""
    return e.constant(list(values), dtype=DType.INT64)


def activated(e: Emitter, node: OnnxNode, x: Value) -> list[Value]:
    """The first output: `x` after the attribute `activation`, with `activation_params` or `activation_alpha` ..."""
    kind: Any = node.attrs.get("activation", "")
    if kind not in _ACTIVATIONS:
        raise UnsupportedError(f"activation is {kind}, expected one of {', '.join(_ACTIVATIONS)}", where=node.where)
    names = _ACTIVATIONS[kind]
    listed: Any = node.attrs.get("activation_params", ())
    given = dict(zip(names, listed, strict=False))
    given |= {name: node.attrs[_PARAMETERS[name]] for name in names if _PARAMETERS.get(name) in node.attrs}
    if kind == "Clip":
        return last(e, node, "Clip", x, *(constant(e, given[name], x) if name in given else None for name in names))
    return last(e, node, kind, x, **given)


_ACTIVATIONS = {
    "Clip": ("min", "max"), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Relu": (),
    "Sigmoid": (), "Softplus": (), "Softsign": (), "Tanh": (), "ThresholdedRelu": ("alpha",),
}  # fmt: skip
_PARAMETERS = {"alpha": "activation_alpha", "beta": "activation_beta"}
