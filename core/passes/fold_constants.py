"""Nodes whose inputs are all constants are replaced by what their references compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import LatheError
from core.ir.dim import SymDim, product
from core.ir.graph import Array, Attr, Graph, Node
from core.ir.types import DType, TensorType
from core.ops import registry
from core.ops.inference import infer_graph
from core.passes.base import PassResult
from core.passes.edit import Editor

# Families whose references look at each element a few times. Others may combine all elements of one input with all of
# another: up to so many combinations.
_QUICK = frozenset({
    "elementwise", "activation", "logic", "creation", "movement", "indexing", "slicing", "quantize", "reduce",
    "softmax", "norm", "order",
})  # fmt: skip
_MOST_COMBINATIONS = 1 << 30
_WIDENING = ("Cast", "DequantizeLinear")
_REPEATING = ("Expand", "Tile")


@dataclass(frozen=True)
class FoldConstants:
    """A result larger than its inputs is folded up to `limit_bytes`, or `limit_copies` when it only repeats its input:
    repeating while running reads less memory. Where each element becomes a wider one the result may be `growth` times
    as large. All results together are at most `growth` times what the graph holds, so that no number of nodes fills the
    memory of the machine that compiles."""

    limit_bytes: int = 1 << 26
    limit_copies: int = 1 << 20
    growth: int = 4
    name: str = "fold_constants"

    def run(self, graph: Graph) -> PassResult:
        known = infer_graph(graph)
        editor = Editor(graph)
        left = self.growth * max(self.limit_bytes, sum(array.nbytes for array in graph.constants.values()))
        for node in editor.nodes():
            value = _static(known.get(node.output)) if len(node.outputs) == 1 else None
            arrays = [value] if value is not None else self._evaluated(editor, node, left)
            if all(array is not None for array in arrays):
                left -= sum(array.nbytes for array in arrays if array is not None)
                _replace(editor, node, arrays)
        return editor.finish()

    def _evaluated(self, editor: Editor, node: Node, left: int) -> Sequence[Array | None]:
        """The node's outputs of at most `left` bytes, or [None] when it cannot or should not be computed now."""
        inputs = [editor.array(value) for value in node.inputs]
        if any(a is None and v is not None for a, v in zip(inputs, node.inputs, strict=True)):
            return [None]
        if not _is_foldable(node) or not self._is_small(node, inputs, left) or not _is_quick(node):
            return [None]
        return _evaluate(node, inputs)

    def _is_small(self, node: Node, inputs: Sequence[Array | None], left: int) -> bool:
        made = sum(_nbytes(value.type) for value in node.outputs)
        given = sum(array.nbytes for array in {id(array): array for array in inputs if array is not None}.values())
        growth = self.growth if node.op in _WIDENING else 1
        limit = self.limit_copies if node.op in _REPEATING else self.limit_bytes
        return made <= min(left, max(limit, growth * given))


def _is_foldable(node: Node) -> bool:
    static = all(isinstance(value.type, TensorType) and value.type.is_static for value in node.outputs)
    return static and registry.get(node.op).pure and not any(map(_depends, node.attrs.values()))


def _is_quick(node: Node) -> bool:
    """Whether the reference surely takes no longer than compiling may. Text does not: think of regular expressions."""
    types = [value.type for value in node.inputs if value is not None]
    tensors = [type_ for type_ in types if isinstance(type_, TensorType)]
    if any(type_.dtype is DType.STRING for type_ in tensors):
        return False
    family = type(registry.get(node.op)).__module__.rpartition(".")[2]
    combinations = product(type_.size for type_ in tensors)
    return family in _QUICK or (isinstance(combinations, int) and combinations <= _MOST_COMBINATIONS)


def _depends(attr: Attr) -> bool:
    """Whether an attribute holds a nested graph or a symbolic dimension."""
    if isinstance(attr, tuple):
        return any(map(_depends, attr))
    return isinstance(attr, Graph | SymDim)


def _nbytes(type_: object) -> int:
    nbytes = type_.nbytes if isinstance(type_, TensorType) else 0
    return nbytes if isinstance(nbytes, int) else 0


def _static(array: Array | None) -> Array | None:
    """A value of shape arithmetic that has no symbols in it."""
    return array if array is not None and array.dtype != object else None


def _evaluate(node: Node, inputs: Sequence[Array | None]) -> Sequence[Array | None]:
    op = registry.get(node.op)
    try:
        with np.errstate(all="ignore"):
            result = op.reference(registry.Call(op, node, inputs), *inputs)
    except (LatheError, ValueError, IndexError, TypeError, ArithmeticError, MemoryError, RuntimeError):
        return [None]  # what fails here must fail when the model runs, not when it is compiled
    results = result if isinstance(result, tuple) else (result,)
    arrays = [np.asarray(array) for array in results[: len(node.outputs)]]
    fits = [array.dtype == value.dtype.numpy for array, value in zip(arrays, node.outputs, strict=True)]
    return arrays if all(fits) else [None]


def _replace(editor: Editor, node: Node, arrays: Sequence[Array | None]) -> None:
    for value, array in zip(node.outputs, arrays, strict=True):
        if array is not None and array.dtype == value.dtype.numpy:
            own = array if array.base is None else array.copy()  # not a view that keeps a larger array alive
            editor.replace(value, editor.constant(own, value.name))
