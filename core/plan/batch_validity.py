"""Checks whether the shapes of a node hold for every batch size, so that kernels may rely on them.

A model may add [n, 4] to [3, 4], which is valid for n = 1 and n = 3 only. Inference has to accept it, but compiled code
does not compare sizes at run time, and would read beyond its operands. Where a model computes a shape from data, its
declared shapes are unverified until it runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from lathe.core.errors import LatheError
from lathe.core.ir.dim import Dim, violated_assumption
from lathe.core.ir.dims import size_index
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.assumed_extents import may_repeat, node_assumptions
from lathe.core.ops.opdef.inference import forget_types, infer_graph
from lathe.core.passes.lowering.control_flow import CONTROL

# Small values for the sizes: different within a row and within a column, so that no two extents agree by accident.
_SMALL = (
    (5, 7, 11, 13, 17),
    (7, 11, 5, 17, 13),
    (6, 9, 14, 10, 15),
    (3, 4, 2, 5, 6),
    (2, 3, 4, 6, 8),
    (4, 2, 6, 8, 3),
)
_PROBE = 1_000_003  # a prime far above the extents of models, so that it does not agree with one by accident


def is_valid_for_every_batch(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether type inference with numbers for `n` and for sizes gives the types that the node's outputs declare.

    `n` and each size get another number above a million. If inference then refuses the node or gives other types, which
    assumptions of the node may cause, combinations of small sizes decide: True if some combination meets the
    assumptions, and all that do give the declared types; False if there are no sizes. False also if an extent with a
    maximum, such as min(n, 64), broadcasts in some runs only. True for a node whose types have no symbols and whose
    parameters are constant.
    """
    inputs = list(dict.fromkeys(value for value in node.inputs if value is not None))
    if not any(value.tensor.symbols for value in [*inputs, *node.outputs]) and not _depends_on_data(node, constants):
        return True
    if may_repeat(node, constants):
        return False
    names = {name for value in (*inputs, *node.outputs) for name in value.tensor.symbols}
    places = {name: place for name in names if (place := size_index(name)) is not None}
    if _agrees(node, constants, {"n": _PROBE, **{name: _PROBE + 2 * place + 2 for name, place in places.items()}}):
        return True
    # Assumptions of the node, for example on the end of a slice, may exclude large sizes. Then small ones decide.
    supposed = tuple(node_assumptions(node, dict(constants)))
    small = [{name: numbers[place % len(numbers)] for name, place in places.items()} for numbers in _SMALL]
    possible = [sizes for sizes in small if not violated_assumption(supposed, sizes)]
    return bool(places and possible) and all(_agrees(node, constants, {**sizes}) for sizes in possible)


def _agrees(node: Node, constants: Mapping[Value, Array], env: Mapping[str, Dim]) -> bool:
    """Whether inference with the symbols in `env` replaced accepts the node, and gives the declared output types."""
    twin = _twin(node, constants, env)
    declared = [value.type for value in twin.outputs]
    return _is_valid(twin) and [value.type for value in twin.outputs] == declared


def find_batch_specific_node(graph: Graph, around: Mapping[Value, Array] | None = None) -> Node | None:
    """The first live node, also in control-flow bodies, for which `_is_batch_specific` is true; None if there is none.

    `around` has the constants of the enclosing graphs. Code for a fixed batch size may have a kernel for such a node.
    """
    constants = {**(around or {}), **graph.constants}
    for node in graph.live_nodes():
        if node.op in CONTROL:
            found = next(filter(None, (find_batch_specific_node(body, constants) for body in node.subgraphs)), None)
        else:
            found = node if _is_batch_specific(node, constants) else None
        if found is not None:
            return found
    return None


def _is_batch_specific(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether a node is valid for some batch sizes only: inference accepts it with `n`, but not with a large number.

    False for a node that is never valid: it is in a branch that no run takes. False if no input depends on `n`, or if
    a parameter such as a shape is not constant: then the batch size alone does not decide.
    """
    if _depends_on_data(node, constants):
        return False
    types = [value.type for value in node.inputs if value is not None]
    if not any(isinstance(type_, TensorType) and "n" in type_.symbols for type_ in types):
        return False
    return not _is_valid(_twin(node, constants, {"n": _PROBE})) and _is_valid(_twin(node, constants, {}))


def _twin(node: Node, constants: Mapping[Value, Array], env: Mapping[str, Dim]) -> Graph:
    """A graph with a copy of the node alone and the constants that it reads, with the symbols in `env` replaced."""
    inputs = list(dict.fromkeys(value for value in node.inputs if value is not None))
    given = [value for value in inputs if value not in constants]
    known = {value: constants[value] for value in inputs if value in constants}
    return Graph("probe", given, list(node.outputs), [node], known).clone(env)


def _is_valid(twin: Graph) -> bool:
    """Whether inference accepts the graph `twin`; side effect: inference sets the types of all outputs of its nodes."""
    forget_types(twin)
    try:
        infer_graph(twin)
    except LatheError:
        return False
    return True


def _depends_on_data(node: Node, constants: Mapping[Value, Array]) -> bool:
    """Whether a parameter input of the node, such as a shape or axes, is not a constant."""
    indices = registry.get(node.op).params.values()
    return any((value := node.input(index)) is not None and value not in constants for index in indices)
