"""Adds low-rank adapters to the graph of a decoder: each token chooses one of them, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.language.adapters import Adapter, Factors
from lathe.core.passes.rewrite.editor import Editor

INPUT = "adapters"


def add_adapters(graph: Graph, adapters: Sequence[Adapter], weights: Mapping[Value, str]) -> None:
    """Add the products of the adapters to the graph's products with weights, and the input `adapters`, int64 [n].

    The graph has an input `positions` of the same type.

    `weights` has the path of the layer of each weight. The number of a token's adapter counts from 1; 0 is none. Tokens
    of different adapters share a run: `ExpertProduct` multiplies each row by the factors of its own adapter.
    """
    (positions,) = (value for value in graph.inputs if value.name == "positions")
    number = Value(INPUT, TensorType(DType.INT64, positions.shape))
    graph.inputs.append(number)
    editor, missing = Editor(graph), {path for adapter in adapters for path in adapter.factors}
    for node in editor.nodes():
        path = weights.get(node.inputs[1]) if node.op == "Gemm" and node.inputs[1] is not None else None
        if path in missing:
            missing.remove(path)
            _add(editor, node, number, [adapter.factors.get(path) for adapter in adapters])
    assert not missing, missing
    editor.finish()


def _add(editor: Editor, node: Node, number: Value, factors: Sequence[Factors | None]) -> None:
    a, b = _stacked(factors)
    x = node.required_input(0)
    inner = editor.emit(node, "ExpertProduct", x, number, editor.constant(a, f"{node.name}.lora_a"))
    added = editor.emit(node, "ExpertProduct", inner, number, editor.constant(b, f"{node.name}.lora_b"))
    base = editor.emit(node, node.op, *node.inputs, attrs=node.attrs)
    editor.replace(node.output, editor.emit(node, "Add", base, added))


def _stacked(factors: Sequence[Factors | None]) -> tuple[Array, Array]:
    """The factors of a layer, [count + 1, rank, in] and [count + 1, out, rank]: zeros first, and where there are none.

    Smaller ranks are filled up with zeros, which change no sum.
    """
    given = [each for each in factors if each is not None]
    rank = max(each.a.shape[0] for each in given)
    a = np.zeros((len(factors) + 1, rank, given[0].a.shape[1]), np.float32)
    b = np.zeros((len(factors) + 1, given[0].b.shape[0], rank), np.float32)
    for index, each in enumerate(factors, 1):
        if each is not None:
            a[index, : len(each.a)], b[index, :, : len(each.a)] = each.a, each.b
    return a, b
