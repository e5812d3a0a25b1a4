"""GatherBlockQuantized: rows of a table that is quantized in blocks, each with its own scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers
from lathe.core.frontends.contrib.quantized import unpack
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Array, Value

_DEFAULTS = {"bits": 4, "block_size": 128, "gather_axis": 0, "quantize_axis": 1}


@lowers("GatherBlockQuantized")
def _gather_block_quantized(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Gather of rows from a constant table, in which each block along `quantize_axis` has a scale and a zero point.

    Rows are gathered before they are dequantized, so that the table in memory stays quantized. Without zero points, the
    middle of the range represents zero in a table of uint8, and 0 in others. UnsupportedError if the table or its zero
    points are no constants of 4 or 8 bits, or if rows are gathered along the axis of blocks, or if `block_size` is
    below 1.
    """
    attrs: dict[str, Any] = {name: node.attrs.get(name, default) for name, default in _DEFAULTS.items()}
    rank, block = node.rank(0), attrs["block_size"]
    gather_axis, axis = attrs["gather_axis"] % rank, attrs["quantize_axis"] % rank
    table, zero = (_numbers(e, node.input(index), attrs["bits"]) for index in (0, 3))
    if table is None or (node.input(3) is not None and zero is None) or gather_axis == axis or block < 1:
        raise UnsupportedError("needs a constant table of 4 or 8 bits, not gathered along its blocks", where=node.where)

    def gather(rows: Value) -> Value:
        return e("Gather", rows, node.required(1), axis=gather_axis)

    at = axis + node.rank(1) - 1 if gather_axis < axis else axis  # the axis of blocks in the result
    extent = table.shape[axis]
    block_indices = e.constant(np.arange(extent) // block)
    scales = gather(node.required(2))
    y = e("Cast", gather(e.constant(table)), to=scales.dtype.onnx_code)
    if zero is not None:
        points = e("Cast", gather(e.constant(zero)), to=scales.dtype.onnx_code)
        y = e("Sub", y, e("Gather", points, block_indices, axis=at))
    elif table.dtype == np.uint8 and _has_byte_elements(node):
        y = e("Sub", y, constant(e, 1 << (attrs["bits"] - 1), y))
    if extent % block or gather_axis > axis:
        return emit_output(e, node, "Mul", y, e("Gather", scales, block_indices, axis=at))
    tail = table.shape[axis + 1 :]  # the axis is split into blocks, so that scales broadcast
    y = e("Reshape", y, int64s(e, *(0,) * at, extent // block, block, *tail))
    y = e("Mul", y, e("Unsqueeze", scales, int64s(e, at + 1)))
    return emit_output(e, node, "Reshape", y, int64s(e, *(0,) * at, extent, *tail))


def _has_byte_elements(node: OnnxNode) -> bool:
    """Whether the element type of the table has 8 bits, not 4."""
    return node.required(0).dtype.bits == 8


def _elements(e: Emitter, value: Value | None) -> Array | None:
    """The elements of a constant, or of a constant that Reshape gives another shape; None for other values.

    Models whose last product has the weights of the embedding store them once, in the shape of the product.
    """
    array = e.value_of(value)
    if array is not None or value is None or value.producer is None or value.producer.op != "Reshape":
        return array
    data = e.value_of(value.producer.input(0))
    return None if data is None or not value.tensor.is_static else data.reshape(value.tensor.evaluate({}))


def _numbers(e: Emitter, value: Value | None, bits: int) -> Array | None:
    """The elements of a constant, one per byte; None if the value is absent or unknown, or `bits` is not 4 or 8.

    An array of uint8 has two numbers of 4 bits in each byte if `bits` is 4.
    """
    array = _elements(e, value)
    if array is None or value is None or bits not in (4, 8):
        return None
    if value.dtype.numpy == np.uint8:
        return np.ascontiguousarray(unpack(array, bits))
    return array.astype(np.uint8 if value.dtype.label.startswith("u") else np.int8)
