"""How selectors read a node: attributes with their defaults, bound parameters, axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.ir.graph import Node
from core.ops import registry
from core.ops.registry import NodeView


def attribute(node: Node, name: str) -> Any:
    """The attribute's value or the operator's default; None when the operator does not know the name."""
    op = registry.find(node.op)
    return NodeView(op, node).attr(name) if op is not None else node.attrs.get(name)


def integers(node: Node, name: str) -> tuple[Any, ...] | None:
    """An attribute or bound parameter as a flat tuple of integers or dimensions; None when absent or empty-handed."""
    value = node.attrs.get(name)
    if value is None:
        value = attribute(node, name)
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return tuple(value.ravel().tolist())
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def axis_of(axis: Any, rank: int) -> int:
    """An axis counted from either end, as one from the front."""
    return int(axis) % rank if rank else 0
