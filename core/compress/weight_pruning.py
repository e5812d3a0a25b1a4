"""Unstructured pruning after training: the weights of least magnitude become 0, one by one or in a pattern.

The model keeps its shapes. Zeros save memory in compressed files, and time only in kernels that skip them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe.core.compress.masks import Pattern, masks_of, parse_pattern
from lathe.core.compress.product_moments import as_matrices, from_matrices
from lathe.core.compress.products import check_skipped, has_constant_weights, prepare
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Graph, Node
from lathe.core.passes.rewrite.editor import Editor


@dataclass(frozen=True)
class WeightPruning:
    """The choices of unstructured pruning.

    `sparsity` is the share of zeros (N:M patterns ignore it), in each product or with `is_global` in all together.
    `pattern`: see `masks.py`. Products with fewer weights than `least_elements`, and the nodes of `skip`, stay as they
    are. UnsupportedError unless 0 < `sparsity` < 1, and for another `pattern`.
    """

    sparsity: float = 0.5
    pattern: str = "element"
    is_global: bool = False
    least_elements: int = 1
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.sparsity < 1:
            raise UnsupportedError(f"sparsity: expected more than 0, below 1, got {self.sparsity}")
        parse_pattern(self.pattern)

    @property
    def blocks(self) -> Pattern:
        return parse_pattern(self.pattern)


@dataclass(frozen=True)
class Sparsity:
    """The weights of one product: their number, and how many are 0."""

    name: str
    weights: int
    zeros: int


DEFAULTS = WeightPruning()


def prune_weights(graph: Graph, options: WeightPruning = DEFAULTS) -> tuple[Graph, list[Sparsity]]:
    """A copy of `graph` with zeros among the weights of Conv, MatMul and Gemm, and the sparsity of each product.

    Passes rewrite the copy first, as in `quantize_static`. UnsupportedError if `options.skip` names no node, no
    product has constant weights, or `graph` computes with integers already.
    """
    prepared = prepare(graph)
    editor = Editor(prepared)
    found = _large_products(editor, options)
    scores = {node: np.abs(as_matrices(node, weights)) for node, weights in found.items()}
    report = []
    for node, mask in masks_of(scores, options.sparsity, options.blocks, options.is_global).items():
        weights, value = found[node], node.required_input(1)
        kept = from_matrices(node, mask, weights.shape)
        stored = editor.constant(np.where(kept, weights, np.float32(0)), f"{value.name}_pruned")
        editor.set_inputs(node, [node.inputs[0], stored, *node.inputs[2:]])
        report.append(Sparsity(node.name or node.output.name, weights.size, int(weights.size - kept.sum())))
    editor.finish()
    return prepared, report


def check_sparsity(graph: Graph, options: WeightPruning = DEFAULTS) -> None:
    """UnsupportedError if a name in `options.skip` names no node of `graph`, or if no product has constant weights.

    Also if it computes with integers already.
    """
    _large_products(Editor(prepare(graph)), options)


def _large_products(editor: Editor, options: WeightPruning) -> dict[Node, Array]:
    """The products of the editor's prepared graph that are pruned, and their weights; errors as in `check_sparsity`."""
    check_skipped(editor.graph, options.skip)
    least, found = options.least_elements, {}
    for node in editor.graph.nodes:
        weights = editor.array(node.input(1)) if has_constant_weights(editor, node) else None
        if weights is None or node.name in options.skip or weights.size < least:
            continue
        if node.op == "Conv" or weights.ndim == 2:
            found[node] = weights
    if not found:
        raise UnsupportedError(f"expected a Conv, MatMul or Gemm with constant weights of {least} or more, got none")
    return found
