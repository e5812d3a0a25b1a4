"""Finds the initializers that a run may replace: those that are also inputs and on whose values no node depends.

Adapters to newer opsets, lowerings and function definitions may read known values and shapes, and write different nodes
for different ones. So the file is imported a second time, without the values of these initializers and with their
declared shapes. If that gives the same nodes, the nodes are right for every value.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import numpy as np

from lathe.core.errors import LatheError
from lathe.core.ir.graph import Array, Attr, Graph, Node
from lathe.core.ir.types import TensorType

Types = Mapping[str, TensorType]


def replaceable_defaults(graph: Graph, types: Types, read: Container[str], without: Callable[[Types], Graph]) -> Types:
    """A set of defaults, out of `types`, on whose values the nodes of `graph` do not depend; may be empty.

    `types` maps the names of all defaults to the types of replacements. `without` imports the same file again, with the
    given defaults as inputs of these types. `read` has the names of the values that an adapter has read. Two sets are
    tried: all defaults, then those that no adapter has read. The result is the first set with which `without` gives the
    same graph (`_same_graph`) and raises no LatheError.
    """
    unread = {name: type_ for name, type_ in types.items() if name not in read}
    attempts = [types] if len(unread) in (0, len(types)) else [types, unread]
    return next((attempt for attempt in attempts if _is_independent(graph, attempt, without)), {})


def _is_independent(graph: Graph, types: Types, without: Callable[[Types], Graph]) -> bool:
    try:
        return _same_graph(graph, without(types), types)
    except LatheError:  # an operator needs the value
        return False


def _same_graph(one: Graph, other: Graph, given: Container[str]) -> bool:
    """Whether two graphs have the same inputs, outputs, nodes and constants.

    Values are compared by name, and their types may differ. The values named in `given` are left out: they are
    constants of `one` and inputs of `other`.
    """
    return (
        [value.name for value in one.inputs] == [value.name for value in other.inputs if value.name not in given]
        and [value.name for value in one.outputs] == [value.name for value in other.outputs]
        and len(one.nodes) == len(other.nodes)
        and all(_same_node(a, b) for a, b in zip(one.nodes, other.nodes, strict=True))
        and _same_constants(_constants(one, given), _constants(other, given))
    )


def _constants(graph: Graph, given: Container[str]) -> dict[str, Array]:
    return {value.name: array for value, array in graph.constants.items() if value.name not in given}


def _same_constants(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(_same_array(one[name], other[name]) for name in one)


def _same_node(one: Node, other: Node) -> bool:
    return (
        (one.op, one.name) == (other.op, other.name)
        and _names(one) == _names(other)
        and one.attrs.keys() == other.attrs.keys()
        and all(_same_attr(one.attrs[key], other.attrs[key]) for key in one.attrs)
    )


def _names(node: Node) -> tuple[list[str | None], list[str]]:
    return [value.name if value is not None else None for value in node.inputs], [value.name for value in node.outputs]


def _same_attr(one: Attr, other: Attr) -> bool:
    if isinstance(one, Graph) and isinstance(other, Graph):
        return _same_graph(one, other, ())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return _same_array(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_attr, one, other))
    return type(one) is type(other) and bool(one == other)


def _same_array(one: Array, other: Array) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.dtype == object:
        return bool(one.tolist() == other.tolist())
    return np.array_equal(_bytes(one), _bytes(other))  # by bytes, so that NaN equals NaN


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
