"""Constant folding: replaces nodes whose inputs are all constants with the results of their references.

Values that type inference knows, such as the Shape of a tensor with known extents, become constants, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.errors import LatheError
from lathe.core.ir.dim import SymDim, product
from lathe.core.ir.graph import Array, Attr, Graph, Node
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor

# Operator families whose references take time proportional to their elements. References of other families may combine
# every element of one input with every element of another: they are limited to `_MOST_COMBINATIONS`.
_QUICK = frozenset({
    "elementwise", "activation", "logic", "creation", "movement", "indexing", "slicing", "quantize", "reduce",
    "softmax", "norm", "order",
})  # fmt: skip
_MOST_COMBINATIONS = 1 << 30
_WIDENING = ("Cast", "DequantizeLinear")
_REPEATING = ("Expand", "Tile")


@dataclass(frozen=True)
class FoldConstants:
    """Folds nodes of constants; the fields limit the size of folded results.

    A result larger than its inputs is folded up to `limit_bytes`. The limit is `limit_copies` bytes for Expand and
    Tile: repeating in the run reads less memory. Conversions to wider types may have `growth` times the bytes of their
    inputs. All results together have at most `growth` times the larger of `limit_bytes` and the bytes of the graph's
    constants, so that folding cannot exhaust memory.
    """

    limit_bytes: int = 1 << 26
    limit_copies: int = 1 << 20
    growth: int = 4
    name: str = "fold_constants"

    def run(self, graph: Graph) -> PassResult:
        known = infer_graph(graph)
        editor = Editor(graph)
        left = self.growth * max(self.limit_bytes, sum(array.nbytes for array in graph.constants.values()))
        for node in editor.nodes():
            value = _without_symbols(known.get(node.output)) if len(node.outputs) == 1 else None
            arrays = [value] if value is not None else self._evaluate(editor, node, left)
            if all(array is not None for array in arrays):
                left -= sum(array.nbytes for array in arrays if array is not None)
                _replace(editor, node, arrays)
        return editor.finish()

    def _evaluate(self, editor: Editor, node: Node, left: int) -> Sequence[Array | None]:
        """The node's outputs, at most `left` bytes, by its reference; [None] for a node that is not folded."""
        inputs = [editor.array(value) for value in node.inputs]
        if any(a is None and v is not None for a, v in zip(inputs, node.inputs, strict=True)):
            return [None]
        if not _is_foldable(node) or not self._is_small(node, inputs, left) or not _is_quick(node):
            return [None]
        return _run_reference(node, inputs)

    def _is_small(self, node: Node, inputs: Sequence[Array | None], left: int) -> bool:
        output_bytes = sum(_nbytes(value.type) for value in node.outputs)
        distinct = {id(array): array for array in inputs if array is not None}
        input_bytes = sum(array.nbytes for array in distinct.values())
        growth = self.growth if node.op in _WIDENING else 1
        limit = self.limit_copies if node.op in _REPEATING else self.limit_bytes
        return output_bytes <= min(left, max(limit, growth * input_bytes))


def _is_foldable(node: Node) -> bool:
    static = all(isinstance(value.type, TensorType) and value.type.is_static for value in node.outputs)
    return static and registry.get(node.op).pure and not any(map(_has_graph_or_symbol, node.attrs.values()))


def _is_quick(node: Node) -> bool:
    """Whether the reference is known to be fast; never for strings, as regular expressions have no bound in time."""
    types = [value.type for value in node.inputs if value is not None]
    tensors = [type_ for type_ in types if isinstance(type_, TensorType)]
    if any(type_.dtype is DType.STRING for type_ in tensors):
        return False
    family = type(registry.get(node.op)).__module__.rpartition(".")[2]
    combinations = product(type_.size for type_ in tensors)
    return family in _QUICK or (isinstance(combinations, int) and combinations <= _MOST_COMBINATIONS)


def _has_graph_or_symbol(attr: Attr) -> bool:
    """Whether an attribute holds a nested graph or a symbolic dimension."""
    if isinstance(attr, tuple):
        return any(map(_has_graph_or_symbol, attr))
    return isinstance(attr, Graph | SymDim)


def _nbytes(type_: object) -> int:
    nbytes = type_.nbytes if isinstance(type_, TensorType) else 0
    return nbytes if isinstance(nbytes, int) else 0


def _without_symbols(array: Array | None) -> Array | None:
    """A value that inference knows, if it contains no symbolic dimensions; otherwise None."""
    return array if array is not None and array.dtype != object else None


def _run_reference(node: Node, inputs: Sequence[Array | None]) -> Sequence[Array | None]:
    op = registry.get(node.op)
    try:
        with np.errstate(all="ignore"):
            result = op.reference(registry.Call(op, node, inputs), *inputs)
    except (LatheError, ValueError, IndexError, TypeError, ArithmeticError, MemoryError, RuntimeError):
        return [None]  # the error belongs to the run, which may never reach this node
    results = result if isinstance(result, tuple) else (result,)
    arrays = [np.asarray(array) for array in results[: len(node.outputs)]]
    fits = [array.dtype == value.dtype.numpy for array, value in zip(arrays, node.outputs, strict=True)]
    return arrays if all(fits) else [None]


def _replace(editor: Editor, node: Node, arrays: Sequence[Array | None]) -> None:
    for value, array in zip(node.outputs, arrays, strict=True):
        if array is not None and array.dtype == value.dtype.numpy:
            own = array if array.base is None else array.copy()  # a view would keep its larger base alive
            editor.replace(value, editor.constant(own, value.name))
