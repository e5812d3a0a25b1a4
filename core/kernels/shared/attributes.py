"""Helpers with which selectors read a node: attributes with defaults, bound parameters, axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from lathe.core.ir.graph import Node
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView


def attribute(node: Node, name: str) -> Any:
    """The value of the node's attribute `name`, otherwise the operator's default; None if there is neither.

    None also for a name that the operator does not define. ModelError if the operator requires the attribute and the
    node lacks it.
    """
    op = registry.find(node.op)
    return NodeView(op, node).attr(name) if op is not None else node.attrs.get(name)


def integers(node: Node, name: str) -> tuple[Any, ...] | None:
    """Attribute `name`, or its default, as a flat tuple of integers or dimensions; None if there is neither.

    The attribute may be a number, a list or an array, or a parameter that was an input and became an attribute.
    ModelError as for `attribute`.
    """
    value = node.attrs.get(name)
    if value is None:
        value = attribute(node, name)
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return tuple(value.ravel().tolist())
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def axis_of(axis: Any, rank: int) -> int:
    """The axis of a tensor of `rank` axes, counted from the front; a negative `axis` counts from the end.

    0 for a scalar.
    """
    return int(axis) % rank if rank else 0
