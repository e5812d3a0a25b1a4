"""The nodes that quantization covers: products with constant weights, and where their output channels are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.grids import Grid, make_grid
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph, Node
from lathe.core.ir.types import DType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.pipeline import Options, required_passes, run_passes
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.simplify.fold_affine import FoldAffine

# The axis of the output channels in the weights (input 1).
CHANNEL_AXIS: Mapping[str, Callable[[Node], int]] = {
    "Conv": lambda node: 0,
    "MatMul": lambda node: -1,
    "Gemm": lambda node: 0 if node.attrs.get("transB") else 1,
}

_PLAIN_GEMM: Mapping[str, float] = {"alpha": 1.0, "beta": 1.0, "transA": 0}


_INTEGER_PRODUCTS = frozenset({"MatMulInteger", "ConvInteger", "QLinearConv", "QLinearMatMul"})


def check_float(graph: Graph) -> None:
    """UnsupportedError if a product of `graph` computes with 8-bit integers already, naming the first one.

    Compressing it again would add a second rounding to the first, and in most cases make it larger. Weights of few bits
    that products of float32 activations read do not count.
    """
    for node in graph.nodes:
        if node.op in _INTEGER_PRODUCTS or (node.op in CHANNEL_AXIS and _reads_integers(graph, node)):
            raise UnsupportedError(
                f"expected a model that computes with floats, but node '{node.name}' ({node.op}) computes with "
                "integers already: compress the model that this one was made from"
            )


def _reads_integers(graph: Graph, product: Node) -> bool:
    """Whether the activation of a product in QDQ form is dequantized."""
    source = product.required_input(0).producer
    return source is not None and source.op == "DequantizeLinear" and source.input(0) not in graph.constants


def prepare(graph: Graph) -> Graph:
    """A copy of `graph` as quantization takes it: lowered, with factors per channel folded into weights, and typed.

    UnsupportedError if it computes with integers already (`check_float`).
    """
    check_float(graph)
    prepared, _ = run_passes(graph, [*required_passes(Options()), FoldAffine(), *required_passes(Options())])
    infer_graph(prepared)
    return prepared


def check_skipped(graph: Graph, skip: Collection[str]) -> None:
    """UnsupportedError if one of the names in `skip` names no node of `graph`."""
    if unknown := sorted(set(skip) - {node.name for node in graph.nodes}):
        raise UnsupportedError(f"skip: expected names of nodes, got {', '.join(unknown)}")


def has_constant_weights(editor: Editor, node: Node) -> bool:
    """Whether a node is a Conv, MatMul or Gemm of a float32 activation with finite constant weights of rank 2 or more.

    A Gemm has alpha 1, beta 1 and transA 0.
    """
    first, second = node.input(0), node.input(1)
    if node.op not in CHANNEL_AXIS or first is None or second is None:
        return False
    weights = editor.array(second)
    if not first.dtype is second.dtype is DType.FLOAT32 or editor.array(first) is not None or weights is None:
        return False
    is_plain = all(node.attrs.get(name, default) == default for name, default in _PLAIN_GEMM.items())
    return is_plain and weights.ndim >= 2 and bool(np.isfinite(weights).all())


def matrix_of(editor: Editor, node: Node) -> NDArray[np.float32] | None:
    """The weights [K, N] of a MatMul or Gemm that `has_constant_weights` accepts; None for other nodes and ranks."""
    if node.op == "Conv" or not has_constant_weights(editor, node):
        return None
    weights = editor.array(node.input(1))
    if weights is None or weights.ndim != 2:
        return None
    return between_layouts(node, weights)


def between_layouts(node: Node, matrix: NDArray[Any]) -> NDArray[Any]:
    """The weights of a MatMul or Gemm as [K, N], or such a matrix in the layout of the node: transposed for transB."""
    return np.ascontiguousarray(matrix.T if node.attrs.get("transB") else matrix)


def grid_of_weights(node: Node, weights: NDArray[np.float32], per_channel: bool) -> tuple[Grid, int]:
    """The symmetric int8 grid of the weights of a product, and the axis of its output channels.

    A scale for each output channel if `per_channel`, otherwise one.
    """
    axis = CHANNEL_AXIS[node.op](node) % weights.ndim
    others = tuple(each for each in range(weights.ndim) if each != axis) if per_channel else None
    bound = np.abs(weights).max(axis=others)
    return make_grid(-bound, bound, DType.INT8, symmetric=True), axis
