"""`QdqWriter`: writes products and sums in ONNX's QDQ form, with QuantizeLinear and DequantizeLinear before them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.grids import Grid
from lathe.core.compress.products import CHANNEL_AXIS
from lathe.core.ir.graph import Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.rewrite.editor import Editor


@dataclass(frozen=True)
class StoredWeights:
    """The integers `codes` of the weights of a product, their grid, and the axis of the output channels."""

    grid: Grid
    codes: NDArray[Any]
    axis: int


class QdqWriter:
    """Inserts the conversions before nodes; each activation is converted once for all nodes that read it.

    `grids` are those of activations, by name; others stay float32. `weights` are those of the products.
    """

    def __init__(self, editor: Editor, grids: Mapping[str, Grid], weights: Mapping[Node, StoredWeights]) -> None:
        self._editor, self._grids, self._weights = editor, grids, weights
        self._converted: dict[Value, Value] = {}

    def write(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            is_product = node.op in CHANNEL_AXIS
            inputs = self._product(node) if is_product else [self._activation(node, value) for value in node.inputs]
            self._editor.set_inputs(node, inputs)

    def _product(self, node: Node) -> list[Value | None]:
        """The inputs of a product, converted."""
        activation, bias = self._activation(node, node.inputs[0]), node.input(2)
        weights = self._weights.get(node)
        if weights is None:
            return [activation, *node.inputs[1:]]
        name = node.required_input(1).name
        stored = self._stored(node, weights.grid, weights.codes, weights.axis, name)
        return [activation, stored, *([self._bias(node, weights.grid)] if bias is not None else [])]

    def _activation(self, anchor: Node, value: Value | None) -> Value | None:
        if value is None or value.name not in self._grids or self._editor.array(value) is not None:
            return value
        if value not in self._converted:
            grid = self._grids[value.name]
            scale, zero = self._constants(grid, value.name)
            whole = self._editor.emit(anchor, "QuantizeLinear", value, scale, zero)
            self._converted[value] = self._editor.emit(anchor, "DequantizeLinear", whole, scale, zero)
        return self._converted[value]

    def _bias(self, node: Node, weights: Grid) -> Value | None:
        """The bias as int32 with the scale of the input times the scale of the weights.

        None if there is no bias. The bias stays as it is if the input stays float32, if it is not a constant of rank 1,
        is too large for int32, or the product of the scales is 0.
        """
        value, activation = node.input(2), node.inputs[0]
        bias = self._editor.array(value)
        assert activation is not None
        if value is None or bias is None or bias.ndim != 1 or activation.name not in self._grids:
            return value
        scale = (self._grids[activation.name].scale * weights.scale * np.ones(bias.shape)).astype(np.float32)
        whole: NDArray[np.float64] = np.rint(bias.astype(np.float64) / np.maximum(scale, np.finfo(np.float32).tiny))
        if np.abs(whole).max(initial=0) > np.iinfo(np.int32).max or not scale.all():
            return value
        grid = Grid(DType.INT32, scale, np.zeros(bias.shape, np.int32))
        return self._stored(node, grid, whole.astype(np.int32), 0, value.name)

    def _stored(self, anchor: Node, grid: Grid, whole: NDArray[Any], axis: int, name: str) -> Value:
        scale, zero = self._constants(grid, name)
        stored = self._editor.constant(whole, f"{name}_quantized")
        return self._editor.emit(anchor, "DequantizeLinear", stored, scale, zero, attrs={"axis": axis})

    def _constants(self, grid: Grid, name: str) -> tuple[Value, Value]:
        return self._editor.constant(grid.scale, f"{name}_scale"), self._editor.constant(
            grid.zero, f"{name}_zero_point"
        )
