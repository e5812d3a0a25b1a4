"""Post-training dynamic quantization: the range of each activation is found in each run, so no data are needed.

DynamicQuantizeLinear chooses the scale of an activation from its least and greatest number, MatMulInteger and
ConvInteger sum the products of bytes in int32, and a multiplication by both scales returns to float32. ONNX Runtime's
`quantize_dynamic` writes the same operators. Weights are int8 with the zero point 0. It suits models whose time goes to
matrix products with large weights, such as transformers; ranges that depend on the data of a run make the results of a
row depend on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from lathe.core.compress.products import check_skipped, grid_of_weights, has_constant_weights, prepare
from lathe.core.compress.rounding import DIRECT_ROUNDINGS, Rounding
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.rewrite.editor import Editor

_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_FEWEST_WEIGHTS = 1 << 10  # of a product: below it the search for the range takes longer than the product


@dataclass(frozen=True)
class DynamicQuantization:
    """The choices of dynamic quantization.

    Weights have a scale for each output channel if `per_channel`, otherwise one for each tensor; they are rounded by
    `rounding` ("adaround" needs data, and is refused), with `seed` for "stochastic". Products with fewer than
    `least_elements` weights, and the nodes of `skip`, stay float32. UnsupportedError for another `rounding`.
    """

    per_channel: bool = True
    rounding: Rounding = "nearest"
    seed: int = 0
    least_elements: int = _FEWEST_WEIGHTS
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.rounding not in DIRECT_ROUNDINGS:
            raise UnsupportedError(f"rounding: expected one of {', '.join(DIRECT_ROUNDINGS)}, got {self.rounding!r}")


DEFAULTS = DynamicQuantization()


def quantize_dynamic(graph: Graph, options: DynamicQuantization = DEFAULTS) -> Graph:
    """A copy of `graph` whose products with constant weights multiply bytes, with ranges found in each run.

    Passes rewrite the copy first, as in `quantize_static`. UnsupportedError if `options.skip` names no node, no
    product is large enough, or `graph` computes with integers already.
    """
    prepared = prepare(graph)
    editor = Editor(prepared)
    products = _large_products(editor, options)
    activations: dict[Value, tuple[Value, Value, Value]] = {}
    for node in products:
        source = node.required_input(0)
        if source not in activations:
            found = editor.emit_many(node, "DynamicQuantizeLinear", [source], 3, {}, f"{source.name}_quantized")
            activations[source] = (found[0], found[1], found[2])
        editor.replace(node.output, _integer_product(editor, node, activations[source], options))
    editor.finish()
    return prepared


def check_dynamic(graph: Graph, options: DynamicQuantization = DEFAULTS) -> None:
    """UnsupportedError if a name in `options.skip` names no node of `graph`, or if no product is large enough.

    Also if it computes with integers already.
    """
    _large_products(Editor(prepare(graph)), options)


def _large_products(editor: Editor, options: DynamicQuantization) -> list[Node]:
    """The products of the editor's prepared graph that are quantized; errors as in `check_dynamic`."""
    check_skipped(editor.graph, options.skip)
    least = options.least_elements
    products = [node for node in editor.graph.nodes if _is_large(editor, node, least, options.skip)]
    if not products:
        raise UnsupportedError(f"expected a Conv, MatMul or Gemm with constant weights of {least} or more, got none")
    return products


def _is_large(editor: Editor, node: Node, least: int, skip: Collection[str]) -> bool:
    if node.name in skip or not has_constant_weights(editor, node):
        return False
    weights = editor.array(node.input(1))
    return weights is not None and weights.size >= least and (node.op == "Conv" or weights.ndim == 2)


def _integer_product(
    editor: Editor, node: Node, activation: tuple[Value, Value, Value], options: DynamicQuantization
) -> Value:
    """The result of a product, computed from the integers, scale and zero point of its activation."""
    given, name = node.required_input(1), node.required_input(1).name
    weights = editor.array(given)
    assert weights is not None, "has_constant_weights"
    grid, axis = grid_of_weights(node, weights, options.per_channel)
    codes = grid.quantized(weights, axis, options.rounding, options.seed)
    scale, attrs = grid.scale, {}
    if node.op == "Conv":
        attrs = {key: node.attrs[key] for key in _WINDOW if node.attrs.get(key) is not None}
        scale = scale.reshape(-1, *(1,) * (weights.ndim - 2)) if options.per_channel else scale
    elif node.attrs.get("transB"):
        codes = np.ascontiguousarray(codes.T)
    whole, activation_scale, zero = activation
    stored = editor.constant(codes, f"{name}_quantized")
    integer = "ConvInteger" if node.op == "Conv" else "MatMulInteger"
    point = editor.constant(np.zeros((), np.int8), f"{name}_zero_point")
    typed: dict[str, Attr] = dict(attrs)
    sums = editor.emit(node, integer, whole, stored, zero, point, attrs=typed)
    scales = editor.emit(node, "Mul", activation_scale, editor.constant(scale, f"{name}_scale"))
    result = editor.emit(node, "Mul", editor.emit(node, "Cast", sums, attrs={"to": DType.FLOAT32}), scales)
    bias = node.input(2)
    if bias is None:
        return result
    array = editor.array(bias)
    if node.op == "Conv":
        extents = (-1, *(1,) * (weights.ndim - 2))
        if array is not None:
            bias = editor.constant(array.reshape(extents), f"{bias.name}_along_channels")
        else:
            bias = editor.reshaped(node, bias, (bias.shape[0], *extents[1:]))
    return editor.emit(node, "Add", result, bias)
