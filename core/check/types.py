"""Whether inference over a rewritten graph still knows what the passes knew.

Later parts of the compiler infer the graph again: what its code supposes of sizes, how it packs. A pass that writes a
node whose operator says less than the nodes before would take shapes from them, and with the shapes their kernels.
"""

from __future__ import annotations

from core.errors import ModelError, VerifyError
from core.ir.dim import Dim, symbols
from core.ir.graph import Graph, Value
from core.ir.types import TensorType
from core.ops.inference import infer_graph


def check_types(graph: Graph) -> None:
    """VerifyError for a value with an extent that its type knows and inference does not: a number, or a size that the
    inputs show. Also where inference refuses the graph."""
    copy = graph.clone()
    try:
        infer_graph(copy)
    except ModelError as error:
        raise VerifyError(f"inference refuses the rewritten graph: {error}") from error
    shown = frozenset().union(*(value.type.symbols for value in graph.inputs if isinstance(value.type, TensorType)))
    for node, again in zip(graph.nodes, copy.nodes, strict=True):
        for value, inferred in zip(node.outputs, again.outputs, strict=True):
            if any(_is_lost(*pair, shown) for pair in zip(_dims(value), _dims(inferred), strict=False)):
                raise VerifyError(f"{value.name!r} ({node.op}) is {value.type}, and inference says {inferred.type}")


def _dims(value: Value) -> tuple[Dim, ...]:
    return (value.type.shape or ()) if isinstance(value.type, TensorType) else ()


def _is_lost(before: Dim, after: Dim, shown: frozenset[str]) -> bool:
    return symbols(before) <= shown and not symbols(after) <= shown
