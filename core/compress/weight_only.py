"""Weight-only quantization: large weights of products become codes of 2, 4 or 8 bits, without data about activations.

The result is standard ONNX: DequantizeLinear of the codes, with a scale for each block of rows, before MatMul and Gemm
(opset 21; 25 for 2 bits). Lathe multiplies the codes as they are stored (`passes/precision/weight_only.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.awq import channel_factors
from lathe.core.compress.block_grids import TYPES, BlockGrid, choose_grid
from lathe.core.compress.calibration import Feeds, collect_moments
from lathe.core.compress.channel_scales import divide_input
from lathe.core.compress.gptq import round_with_corrections
from lathe.core.compress.learned_rounding import learn_rounding
from lathe.core.compress.moments import Moments
from lathe.core.compress.products import between_layouts, check_skipped, matrix_of, prepare
from lathe.core.compress.rounding import ROUNDINGS, Rounding
from lathe.core.errors import DataError, UnsupportedError
from lathe.core.ir.graph import Attr, Graph, Node
from lathe.core.passes.rewrite.editor import Editor

Method = Literal["nearest", "gptq", "awq"]
METHODS: tuple[Method, ...] = get_args(Method)
Activations = Literal["float32", "int8"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
BLOCKS = (0, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class WeightQuantization:
    """The choices of weight-only quantization.

    `bits` of a code: 2, 4 or 8. `block` rows of a column share a scale; 0: all rows. `symmetric` codes have the zero
    point 0. `method`: "gptq" and "awq" need data, "nearest" does not. "nearest" and "awq" round by `rounding`, of which
    "adaround" needs data; "gptq" takes only the rounding "nearest". Weights with fewer than `least_elements` elements,
    and the nodes of `skip`, stay float32. `activations`: with "int8", kernels may round the rows that the weights
    multiply to int8 in each run (`RoundableRows`). UnsupportedError for any other `bits`, `block` (`BLOCKS`), `method`,
    `rounding` or `activations`.
    """

    bits: int = 4
    block: int = 32
    symmetric: bool = False
    method: Method = "nearest"
    rounding: Rounding = "nearest"
    seed: int = 0
    least_elements: int = 1 << 12
    skip: frozenset[str] = frozenset()
    activations: Activations = "float32"

    @property
    def needs_data(self) -> bool:
        return self.method != "nearest" or self.rounding == "adaround"

    def __post_init__(self) -> None:
        for name, given, known in (
            ("bits", self.bits, sorted({bits for bits, _ in TYPES})),
            ("block", self.block, BLOCKS),
            ("method", self.method, METHODS),
            ("rounding", self.rounding, ROUNDINGS),
            ("activations", self.activations, ACTIVATIONS),
        ):
            if given not in known:
                raise UnsupportedError(f"{name}: expected one of {', '.join(map(str, known))}, got {given!r}")
        if self.method == "gptq" and self.rounding != "nearest":
            raise UnsupportedError(f"rounding: expected nearest with gptq, got {self.rounding!r}")


DEFAULTS = WeightQuantization()


def quantize_weights(
    graph: Graph,
    options: WeightQuantization = DEFAULTS,
    batches: Iterable[Feeds] = (),
    threads: int | None = None,
) -> Graph:
    """A copy of `graph` whose large weights of MatMul and Gemm are codes in blocks.

    Passes rewrite the copy first, as in `quantize_static`. GPTQ, AWQ and AdaRound run it on `batches` (representative
    inputs by name), some values at a time (`collect_moments`). UnsupportedError if no weight is large enough, if
    `options.skip` names no node, or if `graph` computes with integers already; DataError without batches where they are
    needed, other errors as in `collect_moments`.
    """
    prepared = prepare(graph)
    editor = Editor(prepared)
    products = _large_products(editor, options)
    if not options.needs_data:
        for product in products:
            _store_rounded(editor, product, options, None)
    else:
        _quantize_with_data(editor, products, options, list(batches), threads)
    editor.finish()
    return prepared


@dataclass(frozen=True)
class _Product:
    node: Node
    matrix: NDArray[np.float32]  # [K, N]

    @property
    def source(self) -> str:
        """The name of the activation."""
        value = self.node.inputs[0]
        assert value is not None, "matrix_of"
        return value.name


def check_weights(graph: Graph, options: WeightQuantization) -> None:
    """UnsupportedError if a name in `options.skip` names no node of `graph`, or if no weight is large enough.

    Also if it computes with integers already.
    """
    _large_products(Editor(prepare(graph)), options)


def _large_products(editor: Editor, options: WeightQuantization) -> list[_Product]:
    """The products of the editor's prepared graph whose weights are quantized; errors as in `check_weights`."""
    check_skipped(editor.graph, options.skip)
    nodes = [node for node in editor.graph.nodes if node.name not in options.skip]
    found = [_Product(node, matrix) for node in nodes if (matrix := matrix_of(editor, node)) is not None]
    products = [product for product in found if product.matrix.size >= options.least_elements]
    if not products:
        least = options.least_elements
        raise UnsupportedError(f"expected a MatMul or Gemm with constant weights of {least} or more elements, got none")
    return products


def _quantize_with_data(
    editor: Editor,
    products: Sequence[_Product],
    options: WeightQuantization,
    batches: Sequence[Feeds],
    threads: int | None,
) -> None:
    """Quantize products by the moments of their inputs; AWQ takes those of one input together.

    DataError without batches.
    """
    if not batches:
        needing = options.method if options.method != "nearest" else options.rounding
        raise DataError(f"calibration: expected at least one batch of data for {needing}, got none")
    by_source: dict[str, list[_Product]] = {}
    for product in products:
        by_source.setdefault(product.source, []).append(product)
    widths = {name: len(group[0].matrix) for name, group in by_source.items()}
    exact = editor.graph.clone()
    for moments_by_name in collect_moments(exact, widths, batches, threads):
        for name, moments in moments_by_name.items():
            group = by_source[name]
            if options.method == "awq":
                _store_with_factors(editor, group, options, moments)
            elif options.method == "nearest":
                for product in group:
                    _store_rounded(editor, product, options, moments.gram)
            else:
                for product in group:
                    grid, codes = round_with_corrections(
                        product.matrix, moments.gram, options.bits, options.block, options.symmetric
                    )
                    _store(editor, product, options, grid, codes)


def _store_rounded(
    editor: Editor, product: _Product, options: WeightQuantization, gram: NDArray[np.float32] | None
) -> None:
    """Round by `options.rounding`, and store; `gram` is the mean of x x^T of the inputs, None without data."""
    importance = np.diag(gram) if gram is not None else None
    grid = choose_grid(product.matrix, options.bits, options.block, options.symmetric, importance)
    if options.rounding == "adaround":
        assert gram is not None, "needs_data"
        scale, zero = grid.for_rows(len(product.matrix))
        _store(editor, product, options, grid, learn_rounding(product.matrix, gram, scale, zero, grid.limits))
    else:
        _store(editor, product, options, grid, grid.quantized(product.matrix, options.rounding, options.seed))


def _store_with_factors(
    editor: Editor, group: Sequence[_Product], options: WeightQuantization, moments: Moments
) -> None:
    """Multiply the weights of products that read one input by AWQ's factors, divide the input, and round."""
    matrices = [product.matrix for product in group]
    factors = channel_factors(matrices, moments, options.bits, options.block, options.symmetric)
    value = group[0].node.inputs[0]
    assert value is not None, "matrix_of"
    divide_input(editor, value, [product.node for product in group], factors)
    gram = moments.gram / factors[:, None] / factors
    for product in group:
        _store_rounded(editor, _Product(product.node, product.matrix * factors[:, None]), options, gram)


def _store(
    editor: Editor, product: _Product, options: WeightQuantization, grid: BlockGrid, codes: NDArray[np.int32]
) -> None:
    """Replace the weight of a product by a DequantizeLinear of codes, in the layout of the weight."""
    node, name = product.node, getattr(product.node.input(1), "name", "weight")
    is_transposed = bool(node.attrs.get("transB"))
    scale, zero = grid.scale, grid.zero.astype(grid.dtype.numpy)
    attrs: dict[str, Attr] = {"axis": int(is_transposed), "block_size": grid.block}
    if grid.block >= len(codes):  # one scale for each column
        scale, zero = scale[0], zero[0]
        attrs = {"axis": 0 if is_transposed else 1}
    else:
        scale, zero = between_layouts(node, scale), between_layouts(node, zero)
    arrays = (between_layouts(node, codes.astype(grid.dtype.numpy)), scale, zero)
    constants = [
        editor.constant(array, f"{name}_{suffix}")
        for array, suffix in zip(arrays, ("codes", "scale", "zero_point"), strict=True)
    ]
    weight = editor.emit(node, "DequantizeLinear", *constants, attrs=attrs, name=f"{name}_dequantized")
    rows = node.required_input(0)
    if options.activations == "int8":
        rows = editor.emit(node, "RoundableRows", rows, name=f"{rows.name}_roundable")
    editor.set_inputs(node, [rows, weight, *node.inputs[2:]])
