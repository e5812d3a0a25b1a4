"""Tables of rows in few bits, in blocks that have a scale each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.errors import UnsupportedError
from core.frontends.contrib.quantized import unpacked
from core.frontends.contrib.table import constant, int64s, last, lowers
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Array, Value

_PRESETS = {"bits": 4, "block_size": 128, "gather_axis": 0, "quantize_axis": 1}


@lowers("GatherBlockQuantized")
def _gathered(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Rows of a table, of which each block along `quantize_axis` has a scale and a zero point. They are picked first,
    so that the table stays as small as it is. Without zero points the middle of uint8 is zero, else 0."""
    given: dict[str, Any] = {name: node.attrs.get(name, preset) for name, preset in _PRESETS.items()}
    rank, block = node.rank(0), given["block_size"]
    picked, axis = given["gather_axis"] % rank, given["quantize_axis"] % rank
    table, zero = (_numbers(e, node.input(index), given["bits"]) for index in (0, 3))
    if table is None or (node.input(3) is not None and zero is None) or picked == axis or block < 1:
        raise UnsupportedError("needs a constant table of 4 or 8 bits, not picked along its blocks", where=node.where)

    def pick(rows: Value) -> Value:
        return e("Gather", rows, node.required(1), axis=picked)

    at = axis + node.rank(1) - 1 if picked < axis else axis  # the axis of blocks in the result
    extent = table.shape[axis]
    places = e.constant(np.arange(extent) // block)
    scales = pick(node.required(2))
    y = e("Cast", pick(e.constant(table)), to=scales.dtype.onnx_code)
    if zero is not None:
        points = e("Cast", pick(e.constant(zero)), to=scales.dtype.onnx_code)
        y = e("Sub", y, e("Gather", points, places, axis=at))
    elif table.dtype == np.uint8 and _is_bytes(node):
        y = e("Sub", y, constant(e, 1 << (given["bits"] - 1), y))
    if extent % block or picked > axis:
        return last(e, node, "Mul", y, e("Gather", scales, places, axis=at))
    tail = table.shape[axis + 1 :]  # every block gets an axis of its own
    y = e("Reshape", y, int64s(e, *(0,) * at, extent // block, block, *tail))
    y = e("Mul", y, e("Unsqueeze", scales, int64s(e, at + 1)))
    return last(e, node, "Reshape", y, int64s(e, *(0,) * at, extent, *tail))


def _is_bytes(node: OnnxNode) -> bool:
    """Whether the table is of bytes, not of a type of 4 bits."""
    return node.required(0).dtype.bits == 8


def _numbers(e: Emitter, value: Value | None, bits: int) -> Array | None:
    """A constant of few bits as bytes. Two numbers of 4 bits lie in a byte of uint8, along the last axis."""
    array = e.value_of(value)
    if array is None or value is None or bits not in (4, 8):
        return None
    if value.dtype.numpy == np.uint8:
        return np.ascontiguousarray(unpacked(array, bits))
    return array.astype(np.uint8 if value.dtype.label.startswith("u") else np.int8)
