"""The verifier: checks the invariants of the IR after import and between passes."""

from __future__ import annotations

from lathe.core.errors import VerifyError
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import TensorType


def verify(graph: Graph, after: str = "") -> None:
    """Check the invariants of `graph` and its bodies; VerifyError names a broken one and `after`, the stage before.

    Names are unique within a graph. Values are defined before nodes read them or run after them, so that there are no
    cycles; outputs and updates of states are
    defined. The producer of a node's output is the node; other values have none. A node has an output. Constants are
    tensors with the shapes of their arrays. A default is a constant, and its type has the constant's dtype and rank.
    """
    try:
        _verify(graph, set())
    except VerifyError as error:
        raise VerifyError(f"{error.reason}{f' (after {after})' if after else ''}", where=error.where) from None


def _verify(graph: Graph, outer: set[Value]) -> None:
    where = f"graph '{graph.name}'"
    defined = set(outer)
    names: set[str] = set()
    for value in [*graph.inputs, *(state.value for state in graph.states), *graph.constants]:
        _define(value, None, defined, names, where)
    for value, array in graph.constants.items():
        _check_constant(value, array.shape, where)
    for value, type_ in graph.defaults.items():
        _check_default(value, type_, graph, where)
    for node in graph.nodes:
        _verify_node(node, defined, names, where)
    for value in graph.live_outs():
        if value not in defined:
            raise VerifyError(f"output %{value.name} is not defined", where=where)


def _verify_node(node: Node, defined: set[Value], names: set[str], where: str) -> None:
    label = f"{where}, node '{node.name}' ({node.op})"
    for value in node.inputs:
        if value is not None and value not in defined:
            raise VerifyError(f"reads %{value.name} before it is defined", where=label)
    if not node.outputs:
        raise VerifyError("has no outputs", where=label)
    for value in node.after:
        if value not in defined:
            raise VerifyError(f"runs after %{value.name}, which is not defined before it", where=label)
    for body in node.subgraphs:
        _verify(body, defined)
    for value in node.outputs:
        _define(value, node, defined, names, label)


def _define(value: Value, producer: Node | None, defined: set[Value], names: set[str], where: str) -> None:
    if value.name in names:
        raise VerifyError(f"two values are named %{value.name}", where=where)
    if value.producer is not producer:
        raise VerifyError(f"%{value.name} names a producer that is not its own", where=where)
    names.add(value.name)
    defined.add(value)


def _check_default(value: Value, type_: TensorType, graph: Graph, where: str) -> None:
    if value not in graph.constants:
        raise VerifyError(f"default %{value.name} is not a constant", where=where)
    if type_.dtype is not value.dtype or type_.rank != len(value.shape):
        raise VerifyError(f"default %{value.name} is {value.type}, but may be given as {type_}", where=where)


def _check_constant(value: Value, shape: tuple[int, ...], where: str) -> None:
    if not isinstance(value.type, TensorType) or value.type.shape != shape:
        raise VerifyError(f"constant %{value.name} is declared {value.type}, its array has shape {shape}", where=where)
