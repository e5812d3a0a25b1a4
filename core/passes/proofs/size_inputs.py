"""Finds size inputs: inputs whose elements decide the extents of other values, such as the size of a resized image.

Nothing that depends on such an extent has a kernel for all values. With the values as constants, the extents are
numbers like any others (`passes/lowering/input_variants.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from lathe.core.ir.dim import is_data_dependent
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph

MAX_ELEMENTS = 16  # of a size input: one number for each axis of a tensor, and some room

# Operators that carry sizes from an input to a parameter: they move elements, or compute with them.
_OF_SIZES = frozenset(
    {
        "Abs", "Add", "Cast", "Ceil", "Clip", "Concat", "Div", "Expand", "Floor", "Gather", "Identity", "Max", "Min",
        "Mod", "Mul", "Neg", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Slice", "Split",
        "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip


def size_inputs(graph: Graph) -> tuple[str, ...]:
    """The names of the size inputs, in the graph's order: inputs of numbers, of rank 0 or 1.

    Empty for a graph with state. Side effect: the types of the graph are inferred again, if it has candidates.
    """
    candidates = [value for value in graph.inputs if _may_hold_sizes(value)]
    if not candidates or graph.states:
        return ()
    known = infer_graph(graph)
    pending = [value for node in graph.nodes for value in _deciding_parameters(node, known)]
    reached = set[Value]()
    while pending:
        value = pending.pop()
        if value in reached:
            continue
        reached.add(value)
        if value.producer is not None and value.producer.op in _OF_SIZES:
            pending += [each for each in value.producer.inputs if each is not None and each not in known]
    return tuple(value.name for value in candidates if value in reached)


def _may_hold_sizes(value: Value) -> bool:
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None or len(type_.shape) > 1:
        return False
    extent = type_.shape[0] if type_.shape else 1
    return (type_.dtype.is_integer or type_.dtype.is_float) and not (isinstance(extent, int) and extent > MAX_ELEMENTS)


def _deciding_parameters(node: Node, known: Mapping[Value, Array]) -> list[Value]:
    """The parameters of a node whose values are not in `known`.

    Empty unless an extent of the node's outputs depends on data.
    """
    types = [value.type for value in node.outputs if isinstance(value.type, TensorType)]
    if not any(is_data_dependent(dim) for type_ in types for dim in type_.shape or ()):
        return []
    parameters = registry.get(node.op).params.items()
    indices = {index for name, index in parameters if name not in ("axis", "axes")}  # an axis is no size
    indices |= set(range(3)) if node.op == "Range" else set()
    values = [node.input(index) for index in indices]
    return [value for value in values if value is not None and value not in known]
