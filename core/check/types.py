"""Checks that type inference over a rewritten graph gives types at least as precise as those that the passes wrote.

Later stages of the compiler infer the types again, for assumptions on sizes and for packing. A pass that writes a node
with less precise inference than the nodes that it replaces would lose shapes, and with them kernels.
"""

from __future__ import annotations

from lathe.core.errors import ModelError, VerifyError
from lathe.core.ir.dim import Dim, symbols
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef.inference import infer_graph


def check_types(graph: Graph) -> None:
    """VerifyError if inference over a copy of the graph finds a less precise extent than a pass wrote.

    An extent is less precise if it has symbols that the inputs do not have, and the extent that the pass wrote has
    none. Values for which inference finds no rank are not compared. VerifyError also if inference refuses the graph.
    """
    copy = graph.clone()
    try:
        infer_graph(copy)
    except ModelError as error:
        raise VerifyError(f"inference refuses the rewritten graph: {error}") from error
    of_inputs = frozenset().union(*(value.type.symbols for value in graph.inputs if isinstance(value.type, TensorType)))
    for node, twin in zip(graph.nodes, copy.nodes, strict=True):
        for value, inferred in zip(node.outputs, twin.outputs, strict=True):
            if any(_is_lost(*pair, of_inputs) for pair in zip(_dims(value), _dims(inferred), strict=False)):
                raise VerifyError(f"{value.name!r} ({node.op}) is {value.type}, and inference says {inferred.type}")


def _dims(value: Value) -> tuple[Dim, ...]:
    return (value.type.shape or ()) if isinstance(value.type, TensorType) else ()


def _is_lost(before: Dim, after: Dim, of_inputs: frozenset[str]) -> bool:
    """Whether a number, or a dimension over symbols of the inputs only, has become a dimension with other symbols."""
    return symbols(before) <= of_inputs and not symbols(after) <= of_inputs
