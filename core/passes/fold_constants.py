"""Nodes whose inputs are all constants are replaced by what their references compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import LatheError
from core.ir.dim import SymDim
from core.ir.graph import Array, Attr, Graph, Node
from core.ir.types import TensorType
from core.ops import registry
from core.ops.inference import infer_graph
from core.passes.base import PassResult
from core.passes.edit import Editor


@dataclass(frozen=True)
class FoldConstants:
    """A result of more than `growth` times its inputs is folded up to `limit_bytes`, or `limit_copies` when it only
    repeats its input: repeating while running reads less memory."""

    limit_bytes: int = 1 << 26
    limit_copies: int = 1 << 20
    growth: int = 4
    name: str = "fold_constants"

    def run(self, graph: Graph) -> PassResult:
        known = infer_graph(graph)
        editor = Editor(graph)
        for node in editor.nodes():
            value = _static(known.get(node.output)) if len(node.outputs) == 1 else None
            arrays = [value] if value is not None else self._evaluated(editor, node)
            if all(array is not None for array in arrays):
                _replace(editor, node, arrays)
        return editor.finish()

    def _evaluated(self, editor: Editor, node: Node) -> Sequence[Array | None]:
        """The node's outputs, or [None] when it cannot or should not be computed now."""
        inputs = [editor.array(value) for value in node.inputs]
        if any(a is None and v is not None for a, v in zip(inputs, node.inputs, strict=True)):
            return [None]
        if not _is_foldable(node) or not self._is_small(node, inputs):
            return [None]
        return _evaluate(node, inputs)

    def _is_small(self, node: Node, inputs: Sequence[Array | None]) -> bool:
        given = sum(array.nbytes for array in inputs if array is not None)
        made = sum(_nbytes(value.type) for value in node.outputs)
        limit = self.limit_copies if node.op in ("Expand", "Tile") else self.limit_bytes
        return made <= max(limit, self.growth * given)


def _is_foldable(node: Node) -> bool:
    static = all(isinstance(value.type, TensorType) and value.type.is_static for value in node.outputs)
    return static and registry.get(node.op).pure and not any(map(_depends, node.attrs.values()))


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
    except (LatheError, ValueError, IndexError, TypeError, ArithmeticError, NotImplementedError):
        return [None]  # what fails here must fail when the model runs, not when it is compiled
    results = result if isinstance(result, tuple) else (result,)
    arrays = [np.asarray(array) for array in results[: len(node.outputs)]]
    fits = [array.dtype == value.dtype.numpy for array, value in zip(arrays, node.outputs, strict=True)]
    return arrays if all(fits) else [None]


def _replace(editor: Editor, node: Node, arrays: Sequence[Array | None]) -> None:
    for value, array in zip(node.outputs, arrays, strict=True):
        if array is not None and array.dtype == value.dtype.numpy:
            editor.replace(value, editor.constant(array.copy(), value.name))
