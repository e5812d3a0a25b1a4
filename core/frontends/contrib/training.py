"""Gradient, of ONNX's training domain: the importer differentiates the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lathe.core.autodiff import derivatives
from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.contrib.lowering_table import lowers
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ops.opdef.terms import Writer


@lowers("Gradient", domain="ai.onnx.preview.training")
def gradient(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Lower Gradient: dy/dx for every x that the attribute `xs` names, by differentiating the graph before the node.

    A derivative is zero where y does not depend on x. UnsupportedError unless the inputs are the values named in `xs`
    and `zs` themselves; ModelError if nothing before the node defines y.
    """
    named = {value.name: value for value in e.graph.values()}
    y = named.get(str(node.attrs.get("y")))
    if y is None:
        raise ModelError(f"y is {node.attrs.get('y')!r}, which nothing before it defines", where=node.where)
    targets = [_input_named(node, index, str(name), named) for index, name in enumerate(_names(node, "xs"))]
    for index, name in enumerate(_names(node, "zs"), start=len(targets)):
        _input_named(node, index, str(name), named)
    writer = Writer(e.graph, e.session.known, e.session.names)
    found = derivatives(writer, [y], targets)
    e.session.known.update(writer.known)
    pairs = zip(found, targets, strict=True)
    results = [value if value is not None else writer.zeros_like(target).value for value, target in pairs]
    return [e.emit("Identity", [value], {}, [name])[0] for value, name in zip(results, node.outputs, strict=True)]


def _names(node: OnnxNode, attribute: str) -> Sequence[Any]:
    names = node.attrs.get(attribute) or ()
    return names if isinstance(names, tuple) else ()


def _input_named(node: OnnxNode, index: int, name: str, named: dict[str, Value]) -> Value:
    """The input at `index`. UnsupportedError unless it is the value `name` of the graph, whose values are `named`."""
    value = node.required(index)
    if named.get(name) is not value:
        message = f"input {index} is %{value.name}: gradients at other values than '{name}' itself are not supported"
        raise UnsupportedError(message, where=node.where)
    return value
