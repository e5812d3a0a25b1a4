"""Whether what is said of a node's shapes holds, so that a kernel may rely on it.

It may only be declared: where a model computes a shape from data, its author's word stands for it until it runs.

A model may add [n, 4] to [3, 4]: that has a meaning for n = 1 and n = 3 only. Inference has to accept it, but code that
never looks at sizes while it runs would read beyond its operands.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import LatheError
from core.ir.graph import Array, Graph, Node, Value
from core.ops import registry
from core.ops.inference import forget_types, infer_graph

_PROBE = 1_000_003  # a prime, and an extent that no model has: no accident makes it agree with another one


def holds_for_every_batch(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether inference with a batch size of its own gives the shapes that it gave with `n`."""
    inputs = list(dict.fromkeys(value for value in node.inputs if value is not None))
    if not any(value.tensor.symbols for value in [*inputs, *node.outputs]) and not _may_be_declared(node, constants):
        return True
    given = [value for value in inputs if value not in constants]
    known = {value: constants[value] for value in inputs if value in constants}
    twin = Graph("probe", given, list(node.outputs), [node], known).clone({"n": _PROBE})
    declared = [value.type for value in twin.outputs]
    forget_types(twin)
    try:
        infer_graph(twin)
    except LatheError:
        return False
    return [value.type for value in twin.outputs] == declared


def _may_be_declared(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether an input that is computed while running decides the shape."""
    indices = registry.get(node.op).params.values()
    return any((value := node.input(index)) is not None and value not in constants for index in indices)
