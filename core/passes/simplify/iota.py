"""Rewrites integers that follow from symbolic sizes as Iota: position numbers, and results of shape arithmetic.

With known sizes they are constants. With sizes known only in a run, Shape, Gather, Add, Range and similar operators on
them need no kernels of their own: one Iota computes the result directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lathe.core.ir.dim import SymDim, symbols
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.positions import PositionFinder, Positions
from lathe.core.passes.rewrite.base import PassResult, input_symbols
from lathe.core.passes.rewrite.editor import Editor

_SOURCES = frozenset({"Range", "Shape", "Size"})


@dataclass(frozen=True)
class WriteIota:
    name: str = "iota"

    def run(self, graph: Graph) -> PassResult:
        allowed = input_symbols(graph)
        if not allowed or all(node.op not in _SOURCES for node in graph.nodes):
            return PassResult(0)  # saves the inference below, which takes most of the time of this pass
        finder, editor = PositionFinder(infer_graph(graph)), Editor(graph)
        found = {node: item for node in graph.nodes if (item := _positions(finder, node, allowed)) is not None}
        for node in editor.nodes():
            if node in found and _is_needed(editor, node.output, found):
                editor.replace(node.output, editor.emit(node, "Iota", attrs=_attrs(node.output, found[node])))
        return editor.finish()


def _positions(finder: PositionFinder, node: Node, allowed: frozenset[str]) -> Positions | None:
    """The `Positions` that a node's single output equals, if they contain symbols, all of them `allowed`; or None."""
    found = finder.of(node.output) if len(node.outputs) == 1 and node.op != "Iota" else None
    if found is None:
        return None
    names = [symbols(dim) for dim in (*found.shape, found.offset, *found.steps) if isinstance(dim, SymDim)]
    return found if names and all(each <= allowed for each in names) else None


def _attrs(value: Value, found: Positions) -> dict[str, Attr]:
    return {"dtype": value.dtype, "shape": found.shape, "start": found.offset, "steps": found.steps}


def _is_needed(editor: Editor, value: Value, found: Mapping[Node, Positions]) -> bool:
    """Whether a value is an output, or read by a node that does not become an Iota itself."""
    return editor.is_output(value) or any(reader not in found for reader in editor.readers(value))
