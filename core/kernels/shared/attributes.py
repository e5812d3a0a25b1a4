"""Helpers with which selectors read a node: attributes with defaults, bound parameters, axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from lathe.core.ir.graph import Node
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView


def attribute(node: Node, name: str) -> Any:
    """The attribute's value, or the operator's default; None if the operator has no such attribute."""
    op = registry.find(node.op)
    return NodeView(op, node).attr(name) if op is not None else node.attrs.get(name)


def integers(node: Node, name: str) -> tuple[Any, ...] | None:
    """An attribute or bound parameter as a flat tuple of integers or dimensions; None if it is absent."""
    value = node.attrs.get(name)
    if value is None:
        value = attribute(node, name)
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return tuple(value.ravel().tolist())
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def axis_of(axis: Any, rank: int) -> int:
    """A possibly negative axis as an axis >= 0."""
    return int(axis) % rank if rank else 0
