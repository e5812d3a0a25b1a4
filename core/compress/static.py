"""Post-training static quantization: activations and weights become integers, in ONNX's QDQ form.

Each activation that a product with constant weights (Conv, MatMul, Gemm) or a sum of two activations (Add) reads passes
through QuantizeLinear and DequantizeLinear, whose scale comes from calibration. Weights and biases are stored as
integers with a DequantizeLinear. The result of a product stays float32 if only a sum reads it: the sum is computed in
the product's registers, where rounding would cost time and accuracy. A sum stays float32 if its result is normalized,
as in transformers: integers would save no time there, and 8 bits do not hold the few large numbers of such sums beside
the others (Bondarenko et al. 2021, https://arxiv.org/abs/2109.12948).
Every ONNX runtime runs this graph; those with integer kernels, as Lathe (`passes/precision/quantized.py`), compute the
products with integers. Jacob et al. 2018 (https://arxiv.org/abs/1712.05877), section 2; Nagel et al. 2021
(https://arxiv.org/abs/2106.08295), section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.bias_correction import add_to_bias, mean_error
from lathe.core.compress.calibration import Feeds, collect_channels, collect_histograms
from lathe.core.compress.equalization import equalize
from lathe.core.compress.grids import Grid, make_grid
from lathe.core.compress.learned_rounding import learn_rounding
from lathe.core.compress.product_moments import as_matrices, collect_product_moments, from_matrices
from lathe.core.compress.products import (
    CHANNEL_AXIS,
    check_skipped,
    grid_of_weights,
    has_constant_weights,
    prepare,
)
from lathe.core.compress.qdq import QdqWriter, StoredWeights
from lathe.core.compress.ranges import DEFAULT_PERCENTILE, METHODS, Method, choose_range
from lathe.core.compress.rounding import ROUNDINGS, Rounding
from lathe.core.compress.smoothing import smooth
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.precision.quantized import MOVING
from lathe.core.passes.rewrite.editor import Editor

_ACTIVATIONS = (DType.UINT8, DType.INT8)
# Operators through which the integers of a sum reach the products that read it.
_PASSING = MOVING | {"Relu", "Clip", "AveragePool", "GlobalAveragePool", "Concat", "Split", "Pad", "Resize"}


@dataclass(frozen=True)
class StaticQuantization:
    """The choices of post-training static quantization.

    `calibration` and `percentile` choose the range of an activation (`ranges.py`). `activations` is the type of
    quantized activations, uint8 or int8; their grids are asymmetric, or symmetric if `symmetric`. Weights are symmetric
    int8, with a scale for each output channel if `per_channel`, otherwise one for each tensor. `smoothing` above 0 is
    the strength of SmoothQuant (`smoothing.py`). `corrects_bias`: the mean error of rounded weights is taken out of the
    results (`bias_correction.py`). `rounding` of weights: "adaround" learns it from the data (`learned_rounding.py`);
    `seed` is that of "stochastic". `equalizes`: factors move between products that only a ReLU or a pooling separates
    (`equalization.py`). `skip` names nodes that stay float32. UnsupportedError for an unknown `calibration`, `rounding`
    or `activations`, and unless 50 < `percentile` <= 100 and 0 <= `smoothing` < 1.
    """

    calibration: Method = "percentile"
    percentile: float = DEFAULT_PERCENTILE
    activations: DType = DType.UINT8
    symmetric: bool = False
    per_channel: bool = True
    smoothing: float = 0.0
    corrects_bias: bool = False
    skip: frozenset[str] = frozenset()
    rounding: Rounding = "nearest"
    seed: int = 0
    equalizes: bool = False

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise UnsupportedError(f"rounding: expected one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")
        if self.calibration not in METHODS:
            raise UnsupportedError(f"calibration: expected one of {', '.join(METHODS)}, got {self.calibration!r}")
        if not 50 < self.percentile <= 100:
            raise UnsupportedError(f"percentile: expected more than 50, at most 100, got {self.percentile}")
        if not 0 <= self.smoothing < 1:
            raise UnsupportedError(f"smoothing: expected at least 0, below 1, got {self.smoothing}")
        activation_type(self.activations)


def activation_type(given: DType | str) -> DType:
    """The element type `given`, or the one with this name; UnsupportedError unless it is uint8 or int8."""
    found = {str(dtype): dtype for dtype in _ACTIVATIONS}.get(str(given))
    if found is None:
        raise UnsupportedError(f"activations: expected {' or '.join(map(str, _ACTIVATIONS))}, got {given}")
    return found


DEFAULTS = StaticQuantization()


def quantize_static(
    graph: Graph,
    batches: Iterable[Feeds],
    options: StaticQuantization = DEFAULTS,
    threads: int | None = None,
) -> Graph:
    """A copy of `graph` in QDQ form. `batches` are representative inputs, by name, for the calibration.

    Passes rewrite the copy first: they lower it, and fold factors per channel into weights. The names in `options.skip`
    are names of its nodes after these passes. UnsupportedError if one of them names no node, if no product is left
    that integers can compute (Conv, MatMul or Gemm of a float32 activation with constant weights), or if `graph`
    computes with integers already; DataError and
    FeedError as in `collect_histograms`.
    """
    calibrated = calibrate(graph, batches, options, threads)
    return calibrated.quantized(calibrated.layers)


@dataclass(frozen=True)
class Calibrated:
    """A graph before quantization, and the grids of its activations, by name.

    `layers` are the indices (in `graph.nodes`) of the products and sums that integers can compute. `means` are those of
    the channels of the products' inputs; empty if biases are not corrected. `codes` are learned weights, by the index
    of their product, in its layout.
    """

    graph: Graph
    grids: Mapping[str, Grid]
    means: Mapping[str, NDArray[np.float64]]
    layers: tuple[int, ...]
    options: StaticQuantization
    codes: Mapping[int, NDArray[np.int32]] = field(default_factory=dict)

    @property
    def products(self) -> tuple[int, ...]:
        """The layers that are products with constant weights."""
        return tuple(index for index in self.layers if self.graph.nodes[index].op in CHANNEL_AXIS)

    def quantized(self, layers: Iterable[int]) -> Graph:
        """A copy of the graph with these layers in QDQ form."""
        copy = self.graph.clone()
        editor = Editor(copy)
        chosen = sorted(layers)
        products = [index for index in chosen if index in self.products]
        stored = {copy.nodes[index]: self._stored(editor, copy.nodes[index], index) for index in products}
        nodes = [copy.nodes[index] for index in chosen]
        QdqWriter(editor, self.grids, stored).write(nodes)
        editor.finish()
        return copy

    def _stored(self, editor: Editor, node: Node, index: int) -> StoredWeights:
        """The integers of the weights of a product; its bias is first corrected if there are means."""
        weights = editor.array(node.input(1))
        assert weights is not None, "_is_quantizable"
        grid, axis = grid_of_weights(node, weights, self.options.per_channel)
        learned = self.codes.get(index)
        if learned is not None:
            whole = learned.astype(np.int8)
        else:
            whole = grid.quantized(weights, axis, self.options.rounding, self.options.seed)
        mean = self.means[node.required_input(0).name] if self.means else None
        if mean is not None and mean.size:
            add_to_bias(editor, node, mean_error(node, weights - grid.dequantized(whole, axis), mean))
        return StoredWeights(grid, whole, axis)


def calibrate(
    graph: Graph,
    batches: Iterable[Feeds],
    options: StaticQuantization = DEFAULTS,
    threads: int | None = None,
) -> Calibrated:
    """Prepare a graph and choose the grid of each activation that integers may represent; errors: `quantize_static`."""
    prepared = prepare(graph)
    layers_of(prepared, options.skip)  # before any run
    if options.equalizes:
        equalize(prepared, options.skip)
    kept: Sequence[Feeds] = ()
    if options.smoothing or options.corrects_bias or options.rounding == "adaround":
        batches = kept = list(batches)  # they are run more than once
        if options.smoothing:
            nodes = [prepared.nodes[index] for index in layers_of(prepared, options.skip)]
            smooth(prepared, nodes, options.smoothing, kept, threads)
    editor, layers = Editor(prepared), layers_of(prepared, options.skip)
    read = dict.fromkeys(value.name for index in layers for value in _activations(editor, prepared.nodes[index]))
    histograms = collect_histograms(prepared, read, batches, threads)
    grids = {
        name: make_grid(
            *choose_range(histogram, options.calibration, options.activations, options.symmetric, options.percentile),
            options.activations,
            options.symmetric,
        )
        for name, histogram in histograms.items()
    }
    means: dict[str, NDArray[np.float64]] = {}
    if options.corrects_bias:
        products = [node for index in layers if (node := prepared.nodes[index]).op in CHANNEL_AXIS]
        axes = {node.required_input(0).name: 1 if node.op == "Conv" else -1 for node in products}
        means = {name: found.mean for name, found in collect_channels(prepared, axes, batches, threads).items()}
    codes = _learned_codes(prepared, layers, options, kept, threads) if options.rounding == "adaround" else {}
    return Calibrated(prepared, grids, means, layers, options, codes)


def _learned_codes(
    graph: Graph, layers: Sequence[int], options: StaticQuantization, batches: Sequence[Feeds], threads: int | None
) -> dict[int, NDArray[np.int32]]:
    """The codes of the weights of products by AdaRound; those of a MatMul of rank above 2 are left out."""
    found: dict[int, Array] = {}
    for index in layers:
        node = graph.nodes[index]
        weights = graph.constant_of(node.input(1)) if node.op in CHANNEL_AXIS else None
        if weights is not None and (node.op == "Conv" or weights.ndim == 2):
            found[index] = weights
    codes = {}
    for index, moments in collect_product_moments(graph, found, batches, threads):
        node, weights = graph.nodes[index], found[index]
        grid, axis = grid_of_weights(node, weights, options.per_channel)
        spread = [1] * weights.ndim
        spread[axis] = -1 if options.per_channel else 1
        scales = as_matrices(node, np.broadcast_to(grid.scale.reshape(spread), weights.shape))
        matrices = as_matrices(node, weights)
        learned = [
            learn_rounding(matrix, gram, scale, np.zeros(()), grid.limits)
            for matrix, gram, scale in zip(matrices, moments.grams, scales, strict=True)
        ]
        codes[index] = from_matrices(node, np.stack(learned), weights.shape)
    return codes


def layers_of(graph: Graph, skip: Collection[str]) -> tuple[int, ...]:
    """The indices of the nodes of a prepared graph that integers can compute, without those that `skip` names.

    UnsupportedError if a name in `skip` names no node, or if none of these nodes is a product with constant weights.
    """
    check_skipped(graph, skip)
    editor = Editor(graph)
    chosen = {node for node in graph.nodes if node.name not in skip and _is_quantizable(editor, node)}
    while sums := {node for node in chosen if node.op == "Add" and not _feeds_only(editor, node, chosen)}:
        chosen -= sums
    layers = tuple(index for index, node in enumerate(graph.nodes) if node in chosen)
    if not any(graph.nodes[index].op in CHANNEL_AXIS for index in layers):
        raise UnsupportedError("expected a Conv, MatMul or Gemm of float32 with constant weights, got none")
    return layers


def _is_quantizable(editor: Editor, node: Node) -> bool:
    """Whether integers can compute the node: a product with constant weights, or a sum of two activations.

    Both operands of a sum are float32 activations of equal types.
    """
    first, second = node.input(0), node.input(1)
    if node.op != "Add" or first is None or second is None:
        return has_constant_weights(editor, node)
    is_constant = editor.array(first) is not None or editor.array(second) is not None
    return first.dtype is DType.FLOAT32 and not is_constant and first.type == second.type


def _feeds_only(editor: Editor, node: Node, chosen: Collection[Node]) -> bool:
    """Whether only these nodes read the result of a node, directly or through operators that pass integers on."""
    if any(editor.is_output(value) for value in node.outputs):
        return False
    readers = [reader for value in node.outputs for reader in editor.readers(value)]
    return all(
        reader in chosen or (reader.op in _PASSING and _feeds_only(editor, reader, chosen)) for reader in readers
    )


def _activations(editor: Editor, node: Node) -> list[Value]:
    """The activations that the node reads as integers: all of a product, and of a sum those that `_fused` leaves."""
    read = [value for value in node.inputs[:2] if value is not None and editor.array(value) is None]
    if node.op == "Add" and (fused := _fused(editor, read)) is not None:
        read.remove(fused)
    return read


def _fused(editor: Editor, operands: Sequence[Value]) -> Value | None:
    """The operand of a sum that is the result of a product with constant weights which nothing else reads, or None.

    Of two, the one of the product that comes first in the graph: the sum becomes its epilogue
    (`lathe.core.passes.fusion.epilogue`).
    """
    order = {node: number for number, node in enumerate(editor.graph.nodes)}
    products = {
        order[node]: value
        for value in operands
        if (node := value.producer) is not None and node.op in CHANNEL_AXIS and editor.only_reader(value) is not None
    }
    return products[min(products)] if products else None
