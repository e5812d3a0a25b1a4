"""Integers that follow from sizes alone become Iota: position numbers, and what shape arithmetic makes of a symbol.

Where every size is a number they are constants. Where one is only known at run time, Shape, Gather, Add, Range and
what else computes such integers have no kernels of their own, and need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.ir.dim import SymDim, symbols
from core.ir.graph import Attr, Graph, Node, Value
from core.ops.inference import infer_graph
from core.passes.base import PassResult, input_symbols
from core.passes.edit import Editor
from core.passes.positions import Finder, Positions

_SOURCES = frozenset({"Range", "Shape", "Size"})


@dataclass(frozen=True)
class WriteIota:
    name: str = "iota"

    def run(self, graph: Graph) -> PassResult:
        free = input_symbols(graph)
        if not free or all(node.op not in _SOURCES for node in graph.nodes):
            return PassResult(0)  # without inference, which takes most of this pass
        finder, editor = Finder(infer_graph(graph)), Editor(graph)
        found = {node: positions for node in graph.nodes if (positions := _of(finder, node, free)) is not None}
        for node in editor.nodes():
            if node in found and _is_read(editor, node.output, found):
                editor.replace(node.output, editor.emit(node, "Iota", attrs=_attrs(node.output, found[node])))
        return editor.finish()


def _of(finder: Finder, node: Node, free: frozenset[str]) -> Positions | None:
    """The positions that a node's one output is, where they depend on a size that the inputs show."""
    found = finder.of(node.output) if len(node.outputs) == 1 and node.op != "Iota" else None
    if found is None:
        return None
    names = [symbols(dim) for dim in (*found.shape, found.offset, *found.steps) if isinstance(dim, SymDim)]
    return found if names and all(each <= free for each in names) else None


def _attrs(value: Value, found: Positions) -> dict[str, Attr]:
    return {"dtype": value.dtype, "shape": found.shape, "start": found.offset, "steps": found.steps}


def _is_read(editor: Editor, value: Value, found: Mapping[Node, Positions]) -> bool:
    """Whether something else than positions is made of a value."""
    return editor.is_output(value) or any(reader not in found for reader in editor.readers(value))
