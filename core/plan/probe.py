"""Whether what is said of a node's shapes holds, so that a kernel may rely on it.

It may only be declared: where a model computes a shape from data, its author's word stands for it until it runs.

A model may add [n, 4] to [3, 4]: that has a meaning for n = 1 and n = 3 only. Inference has to accept it, but code that
never looks at sizes while it runs would read beyond its operands.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import LatheError
from core.ir.dim import Dim, broken
from core.ir.dims import place_of
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import TensorType
from core.ops import registry
from core.ops.inference import forget_types, infer_graph
from core.ops.supposed import may_repeat, supposed_by
from core.passes.control import CONTROL

_SMALL = (  # no two of one place agree
    (5, 7, 11, 13, 17),
    (7, 11, 5, 17, 13),
    (6, 9, 14, 10, 15),
    (3, 4, 2, 5, 6),
    (2, 3, 4, 6, 8),
    (4, 2, 6, 8, 3),
)
_PROBE = 1_000_003  # a prime, and an extent that no model has: no accident makes it agree with another one


def holds_for_every_batch(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether inference with a batch size of its own gives the shapes that it gave with `n`."""
    inputs = list(dict.fromkeys(value for value in node.inputs if value is not None))
    if not any(value.tensor.symbols for value in [*inputs, *node.outputs]) and not _may_be_declared(node, constants):
        return True
    if may_repeat(node, constants):
        return False
    names = {name for value in (*inputs, *node.outputs) for name in value.tensor.symbols}
    places = {name: place for name in names if (place := place_of(name)) is not None}
    if _agrees(node, constants, {"n": _PROBE, **{name: _PROBE + 2 * place + 2 for name, place in places.items()}}):
        return True
    # What a node supposes of sizes, such as an end of a slice, may rule out large ones. Then small ones tell.
    supposed = tuple(supposed_by(node, dict(constants)))
    small = [{name: numbers[place % len(numbers)] for name, place in places.items()} for numbers in _SMALL]
    possible = [sizes for sizes in small if not broken(supposed, sizes)]
    return bool(places and possible) and all(_agrees(node, constants, {**sizes}) for sizes in possible)


def _agrees(node: Node, constants: Mapping[Value, Array], env: Mapping[str, Dim]) -> bool:
    """Whether inference with these numbers gives the shapes that are declared."""
    twin = _twin(node, constants, env)
    declared = [value.type for value in twin.outputs]
    return _is_valid(twin) and [value.type for value in twin.outputs] == declared


def misfit(graph: Graph, around: Mapping[Value, Array] | None = None) -> Node | None:
    """The first node, also inside control flow, that is valid for some batch sizes and not for others; `around`: the
    constants of the graphs around this one. Code for a number in the place of `n` may have a kernel for it."""
    constants = {**(around or {}), **graph.constants}
    for node in graph.live_nodes():
        if node.op in CONTROL:
            found = next(filter(None, (misfit(body, constants) for body in node.subgraphs)), None)
        else:
            found = node if _fits_some(node, constants) else None
        if found is not None:
            return found
    return None


def _fits_some(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether a node is valid for some batch sizes only. One that never is belongs to a branch that nobody takes; where
    data decide the shape, no size tells more than another."""
    if _may_be_declared(node, constants):
        return False
    types = [value.type for value in node.inputs if value is not None]
    if not any(isinstance(type_, TensorType) and "n" in type_.symbols for type_ in types):
        return False
    return not _is_valid(_twin(node, constants, {"n": _PROBE})) and _is_valid(_twin(node, constants, {}))


def _twin(node: Node, constants: Mapping[Value, Array], env: Mapping[str, Dim]) -> Graph:
    """A graph of the node alone, with numbers for some symbols."""
    inputs = list(dict.fromkeys(value for value in node.inputs if value is not None))
    given = [value for value in inputs if value not in constants]
    known = {value: constants[value] for value in inputs if value in constants}
    return Graph("probe", given, list(node.outputs), [node], known).clone(env)


def _is_valid(twin: Graph) -> bool:
    """Whether inference accepts the nodes, whose types it gives anew."""
    forget_types(twin)
    try:
        infer_graph(twin)
    except LatheError:
        return False
    return True


def _may_be_declared(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether an input that is computed while running decides the shape."""
    indices = registry.get(node.op).params.values()
    return any((value := node.input(index)) is not None and value not in constants for index in indices)
