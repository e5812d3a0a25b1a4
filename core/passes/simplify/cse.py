"""Common subexpression elimination: equal nodes with equal inputs run once, equal constants are stored once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor


@dataclass(frozen=True)
class CommonSubexpressions:
    name: str = "cse"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        _merge_constants(editor)
        first: dict[Hashable, Node] = {}
        for node in editor.nodes():
            key = _key(node)
            twin = first.setdefault(key, node) if key is not None else node
            if twin is not node and _can_merge(editor, node, twin):
                for old, new in zip(node.outputs, twin.outputs, strict=True):
                    editor.replace(old, new)
        return editor.finish()


def _can_merge(editor: Editor, node: Node, twin: Node) -> bool:
    """Whether the outputs of a node can be replaced with those of its twin, which computes the same.

    False if an output of the node and the same output of the twin are both outputs of the model, which must stay two
    values. False also for different numbers of outputs.
    """
    if len(node.outputs) != len(twin.outputs):
        return False
    pairs = zip(node.outputs, twin.outputs, strict=True)
    return all(old not in editor.graph.outputs or editor.renamable(new) for old, new in pairs)


def _merge_constants(editor: Editor) -> None:
    first: dict[Hashable, Value] = {}
    sampled = Counter(_sample(array) for array in editor.graph.constants.values())
    for value, array in list(editor.graph.constants.items()):
        if sampled[_sample(array)] == 1:
            continue
        twin = first.setdefault(_array_key(array), value)
        if twin is not value and value not in editor.graph.outputs:
            editor.replace(value, twin)


def _key(node: Node) -> Hashable | None:
    """A key that is equal for nodes with the same operator, inputs and attributes, so that they compute the same.

    Commutative operators may have their inputs in either order. None for random nodes and nodes with bodies.
    """
    op = registry.get(node.op)
    if not op.pure or node.subgraphs:
        return None
    inputs = [id(value) if value is not None else 0 for value in node.inputs]
    if op.commutative and len(inputs) == 2:
        inputs.sort()
    attrs = {name: node.attrs.get(name, default) for name, default in {**op.attrs, **node.attrs}.items()}
    return node.op, tuple(inputs), tuple((name, _attr_key(attrs[name])) for name in sorted(attrs))


def _attr_key(attr: Attr) -> Hashable:
    if isinstance(attr, np.ndarray):
        return _array_key(attr)
    if isinstance(attr, tuple | list):
        return tuple(_attr_key(item) for item in attr)
    return type(attr).__name__, repr(attr)  # repr keeps 0.0, -0.0, False and nan apart


def _sample(array: Array) -> Hashable:
    """A cheap key from about 16 elements, equal for equal arrays; most different constants have different keys."""
    step = max(array.size // 16, 1)
    return str(array.dtype), array.shape, array.flat[::step].tobytes() if array.dtype != object else b""


def _array_key(array: Array) -> Hashable:
    if array.dtype == object:
        return str(array.dtype), array.shape, tuple(map(repr, array.ravel().tolist()))
    return str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
