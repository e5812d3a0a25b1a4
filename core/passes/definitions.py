"""Operators without kernels that others compute: each is replaced by its definition in other operators.

So every later pass, and every proof, sees products: Einsum, and Fourier transforms of a known, moderate length; in
code for any sizes, also of a length that is a size. Col2Im
moves elements, or is a transposed convolution. Norms of float32 are reductions and elementwise operators, OneHot
is a comparison, and so are triangles of matrices. Sequences are reversed by picking their steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import UnsupportedError
from core.ir.dims import is_sized
from core.ir.graph import Graph, Node, attr_symbols
from core.ir.types import Dim, DType
from core.ops import registry
from core.ops.backward import Rewrite
from core.ops.signal import DFT, MOST_WORK, STFT, has_products
from core.ops.terms import Writer
from core.passes.base import PassResult, has_ranks, input_symbols
from core.passes.edit import Editor

_NORMS = frozenset({"LpNormalization", "MeanVarianceNormalization"})
_OF_FLOATS = frozenset({"Einsum", "DFT", "STFT", "Col2Im"}) | _NORMS
_OF_NUMBERS = frozenset({"OneHot"})
# Of any type. A proof knows these themselves, and what they do to rows is lost in their definitions.
# Convolutions whose weights are computed, and that no other pass has given kernels.
CONVOLUTIONS = frozenset({"Conv"})
_FOR_KERNELS = frozenset({"EyeLike", "Hardmax", "MaxUnpool", "ReverseSequence", "Trilu"})

_MOST_PLACES = 1 << 20  # that the frames of a signal take together: their numbers are a table


@dataclass(frozen=True)
class Define:
    """`most_work`: what a Fourier transform may take as products. `for_kernels`: whether kernels run what comes out;
    else a proof looks at it. `only`: the operators to define, where it is not all of them."""

    most_work: int = MOST_WORK
    for_kernels: bool = True
    only: frozenset[str] = frozenset()
    name: str = "definitions"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        defined = self.only or (_OF_FLOATS | _OF_NUMBERS | (_FOR_KERNELS if self.for_kernels else frozenset()))
        while sum(self._rewrite(editor, node) for node in editor.nodes() if node.op in defined):
            pass  # what one definition writes may have one itself
        return editor.finish()

    def _rewrite(self, editor: Editor, node: Node) -> bool:
        if not has_ranks(node) or not self._is_short(editor, node):
            return False
        if node.op in _OF_FLOATS | CONVOLUTIONS and not node.output.dtype.is_float:
            return False
        if node.op in _OF_NUMBERS and node.output.dtype is DType.STRING:
            return False
        if node.op in _FOR_KERNELS and 0 in node.output.shape:  # one node is better than several without kernels
            return False
        if node.op in _NORMS and node.output.dtype is not DType.FLOAT32:  # the reference sums half floats in float32
            return False
        body = _definition(editor, node)
        if body is None or not self._pays(editor, node, body):
            return False
        editor.replace(node.output, editor.splice(node, body)[0])
        return True

    def _is_short(self, editor: Editor, node: Node) -> bool:
        """Whether the tables of a Fourier transform are small, and of a type whose products have kernels."""
        op = registry.get(node.op)
        if not isinstance(op, DFT | STFT):
            return True
        extents = op.extents(registry.Infer(op, node, editor.graph.constants))
        limits = [_MOST_PLACES, *(self.most_work for _ in extents[1:])]
        few = all(map(_is_within, extents, limits))
        return few and has_products(node.output.dtype)

    def _pays(self, editor: Editor, node: Node, body: Graph) -> bool:
        """Whether products take little more time than a fast transform. Where one part of the spectrum is read, only
        half of them remain."""
        op = registry.get(node.op)
        if not isinstance(op, DFT):
            return True
        *_, size = op.extents(registry.Infer(op, node, editor.graph.constants))
        tables = [body.constant_of(value) for each in body.nodes if each.op == "MatMul" for value in each.inputs]
        work = sum(table.size for table in tables if table is not None)
        read = 0.5 if _reads_one_part(editor, node) else 1
        return is_sized(size) or (isinstance(size, int) and work * read <= size * self.most_work)


def _is_within(extent: Dim, limit: int) -> bool:
    """Whether an extent is known to be small. Sizes of a table are supposed to be; no table is made for them before."""
    return is_sized(extent) or (isinstance(extent, int) and 0 < extent <= limit)


def _reads_one_part(editor: Editor, node: Node) -> bool:
    """Whether the real or the imaginary parts of a spectrum are all that is read of it."""
    last, parts = len(node.output.shape) - 1, set[object]()
    for reader in editor.readers(node.output):
        index = editor.array(reader.inputs[1]) if reader.op == "Gather" else None
        along = reader.attrs.get("axis", 0) in (-1, last)
        parts.add(int(index) % 2 if index is not None and index.size == 1 and along else None)
    return len(parts) == 1 and None not in parts and not editor.is_output(node.output)


def _definition(editor: Editor, node: Node) -> Graph | None:
    """What a node computes, as a graph of what it reads; None where that needs what only a run shows."""
    op, body = registry.get(node.op), Graph("definition")
    try:
        (result,) = op.definition(Rewrite(op, node, Writer(body, editor.graph.constants)))
    except UnsupportedError:
        return None
    free = input_symbols(editor.graph)
    if not all(attr_symbols(each) <= free for each in body.nodes):
        return None
    for each in body.nodes:
        each.name = node.name
    body.outputs = [result.value]
    body.remove_dead()
    return body
