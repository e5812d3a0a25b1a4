"""Replaces operators without kernels with their definitions in other operators (`OpDef.definition`).

Later passes and the proofs then need to know matrix products only: Einsum and Fourier transforms become products. A
Fourier transform needs a known, moderate length, or in dynamic-shape code a symbolic one. Col2Im becomes data movement
or a transposed convolution. Norms of float32 become reductions and elementwise operators, OneHot and Trilu comparisons,
ReverseSequence a gather.
"""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.errors import UnsupportedError
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Graph, Node, attr_symbols
from lathe.core.ir.types import Dim, DType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.terms import Writer
from lathe.core.ops.tensor.signal import DFT, MOST_WORK, STFT, has_products
from lathe.core.passes.rewrite.base import PassResult, has_ranks, input_symbols
from lathe.core.passes.rewrite.editor import Editor

_NORMS = frozenset({"LpNormalization", "MeanVarianceNormalization"})
_OF_FLOATS = frozenset({"Einsum", "DFT", "STFT", "Col2Im"}) | _NORMS
_OF_NUMBERS = frozenset({"OneHot"})
# Defined early: a later pass reads the scales and zero points of integer products. And operators of training.
EARLY = frozenset({"DynamicQuantizeLinear", "FakeQuantize", "CodedWeight", "MaskedWeight"})
# Defined late: convolutions with computed weights, for which no other pass found a kernel.
CONVOLUTIONS = frozenset({"Conv"})
# Defined for kernels only, in any element type: proofs have rules for these operators, but not for their definitions.
_FOR_KERNELS = frozenset({"EyeLike", "Hardmax", "MaxUnpool", "ReverseSequence", "Trilu"})

_MOST_PLACES = 1 << 20  # the most elements of all frames of a signal together: their indices become a constant table


@dataclass(frozen=True)
class ExpandDefinitions:
    """Replaces nodes with the definitions of their operators.

    `most_work`: the most multiplications per element of a Fourier transform by products. `for_kernels`: the result is
    compiled, so operators that only kernels need defined are included; otherwise a proof analyses it. `only`: the
    operators to define; empty for all operators of this module but those in `CONVOLUTIONS` and `EARLY`.
    """

    most_work: int = MOST_WORK
    for_kernels: bool = True
    only: frozenset[str] = frozenset()
    name: str = "definitions"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        defined = self.only or (_OF_FLOATS | _OF_NUMBERS | (_FOR_KERNELS if self.for_kernels else frozenset()))
        while sum(self._rewrite(editor, node) for node in editor.nodes() if node.op in defined):
            pass  # a definition may contain operators that have definitions themselves
        return editor.finish()

    def _rewrite(self, editor: Editor, node: Node) -> bool:
        if not has_ranks(node) or not self._is_short(editor, node):
            return False
        if node.op in _OF_FLOATS | CONVOLUTIONS and not node.output.dtype.is_float:
            return False
        if node.op in _OF_NUMBERS and node.output.dtype is DType.STRING:
            return False
        if node.op in _FOR_KERNELS and 0 in node.output.shape:  # empty results have no kernels: one fallback is enough
            return False
        if node.op in _NORMS and node.output.dtype is not DType.FLOAT32:  # the reference sums float16 in float32
            return False
        body = _definition(editor, node)
        if body is None or not self._pays(editor, node, body):
            return False
        for before, after in zip(node.outputs, editor.splice(node, body), strict=False):
            editor.replace(before, after)
        return True

    def _is_short(self, editor: Editor, node: Node) -> bool:
        """Whether a Fourier transform has small tables, and a type whose products have kernels; true for others."""
        op = registry.get(node.op)
        if not isinstance(op, DFT | STFT):
            return True
        extents = op.extents(registry.Infer(op, node, editor.graph.constants))
        limits = [_MOST_PLACES, *(self.most_work for _ in extents[1:])]
        small = all(map(_is_within, extents, limits))
        return small and has_products(node.output.dtype)

    def _pays(self, editor: Editor, node: Node, body: Graph) -> bool:
        """Whether a DFT by products takes little more time than a fast Fourier transform; true for other operators.

        If only the real or only the imaginary part is read, half of the products is dead and not counted.
        """
        op = registry.get(node.op)
        if not isinstance(op, DFT):
            return True
        *_, size = op.extents(registry.Infer(op, node, editor.graph.constants))
        tables = [body.constant_of(value) for each in body.nodes if each.op == "MatMul" for value in each.inputs]
        work = sum(table.size for table in tables if table is not None)
        read = 0.5 if _reads_one_part(editor, node) else 1
        return has_only_sizes(size) or (isinstance(size, int) and work * read <= size * self.most_work)


def _is_within(extent: Dim, limit: int) -> bool:
    """Whether an extent is from 1 to `limit`. A dynamic size passes: its tables are computed in the run."""
    return has_only_sizes(extent) or (isinstance(extent, int) and 0 < extent <= limit)


def _reads_one_part(editor: Editor, node: Node) -> bool:
    """Whether all readers of a spectrum read only its real part, or only its imaginary part."""
    last, parts = len(node.output.shape) - 1, set[object]()
    for reader in editor.readers(node.output):
        index = editor.array(reader.inputs[1]) if reader.op == "Gather" else None
        along = reader.attrs.get("axis", 0) in (-1, last)
        parts.add(int(index) % 2 if index is not None and index.size == 1 and along else None)
    return len(parts) == 1 and None not in parts and not editor.is_output(node.output)


def _definition(editor: Editor, node: Node) -> Graph | None:
    """The definition of a node as a graph that captures its inputs; None if there is none for these shapes.

    None also if the definition needs a symbol that no input of the graph has.
    """
    op, body = registry.get(node.op), Graph("definition")
    try:
        results = op.definition(Rewrite(op, node, Writer(body, editor.graph.constants)))
    except UnsupportedError:
        return None
    allowed = input_symbols(editor.graph)
    if not all(attr_symbols(each) <= allowed for each in body.nodes):
        return None
    for each in body.nodes:
        each.name = node.name
    body.outputs = [result.value for result in results[: len(node.outputs)]]
    body.remove_dead()
    return body
