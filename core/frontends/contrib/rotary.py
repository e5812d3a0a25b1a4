"""Rotary position embedding: pairs of elements are rotated by angles that depend on the position.

Letters in shapes: B batch, S positions, N heads, D elements per head, of which R are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.contrib.attention import positions, split
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers, refuse_attributes
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType

_STREAMS = 3  # of positions: time, height, width


@lowers("RotaryEmbedding")
def _rotary(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """x [B,S,N*D] or [B,N,S,D], rotated by the angles of its positions.

    Input 1 has the position of each element [B,S], or the first position [1], from which those of all rows count up.
    """
    refuse_attributes(node, "is_packed_batching")
    x, position_ids = _heads(e, node), node.required(1)
    if node.rank(1) == 1:
        position_ids = e("Unsqueeze", e("Add", positions(e, x), position_ids), int64s(e, 0))
    cos, sin = (e("Unsqueeze", e("Gather", node.required(index), position_ids), int64s(e, 1)) for index in (2, 3))
    return _result(e, node, x, cos, sin)


@lowers("MRotaryEmbedding")
def _rotary_of_streams(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Rotary embedding with positions [3,B,S] in time, height and width; each pair of elements uses one of them."""
    refuse_attributes(node, "is_packed_batching")
    stream = _pair_streams(node, _half(node))
    cos, sin = (_select_streams(e, e("Gather", node.required(index), node.required(1)), stream) for index in (2, 3))
    if (scale := node.attrs.get("scale", 1.0)) != 1.0:
        cos, sin = (e("Mul", each, constant(e, scale, each)) for each in (cos, sin))
    return _result(e, node, _heads(e, node), cos, sin)


def _select_streams(e: Emitter, tables: Value, stream: Any) -> Value:
    """One table [B,1,S,R/2] from those of three streams [3,B,S,R/2]; `stream` has the stream of each column."""
    first, *others = (e("Gather", tables, e.constant(number), axis=0) for number in np.arange(_STREAMS))
    for number, other in enumerate(others, start=1):
        first = e("Where", e.constant(stream == number), other, first)
    return e("Unsqueeze", first, int64s(e, 1))


def _pair_streams(node: OnnxNode, half: int) -> Any:
    """The stream (0 to 2) of each of the `half` pairs of elements: an int64 array.

    Each stream has one section of consecutive pairs, of its length in `mrope_section`, or the streams alternate if
    `mrope_layout` is 1. ModelError unless the three lengths add up to `half`.
    """
    sizes: Any = node.attrs.get("mrope_section", ())
    if len(sizes) != _STREAMS or sum(sizes) != half:
        raise ModelError(f"mrope_section is {list(sizes)}, expected three numbers of sum {half}", where=node.where)
    if not node.attrs.get("mrope_layout"):
        return np.repeat(np.arange(_STREAMS), sizes)
    stream = np.zeros(half, np.int64)
    for number in range(1, _STREAMS):
        stream[number : _STREAMS * sizes[number] : _STREAMS] = number
    return stream


def _half(node: OnnxNode) -> int:
    """Half the number of rotated elements per head: the width of the tables of cosines and sines.

    UnsupportedError if it is not known.
    """
    width = node.required(2).shape[-1]
    if not isinstance(width, int):
        raise UnsupportedError("needs to know the size of a head", where=node.where)
    return width


def _heads(e: Emitter, node: OnnxNode) -> Value:
    """The first input as [B,N,S,D]. ModelError if only a part of each head is rotated and `num_heads` is absent."""
    x, heads = node.required(0), node.attrs.get("num_heads", 0)
    if node.rank(0) != 3:
        return x
    shape = (heads, -1) if isinstance(heads, int) and heads else (-1, 2 * _half(node))
    if node.attrs.get("rotary_embedding_dim", 0) and shape[0] == -1:
        raise ModelError("has rotary_embedding_dim without num_heads", where=node.where)
    return e("Transpose", e("Reshape", x, int64s(e, 0, 0, *shape)), perm=(0, 2, 1, 3))


def _result(e: Emitter, node: OnnxNode, x: Value, cos: Value, sin: Value) -> list[Value]:
    """Emit the node's output: x [B,N,S,D] rotated by `rotate_first_elements`, in the shape of the first input."""
    y = rotate_first_elements(e, node, x, cos, sin, bool(node.attrs.get("interleaved")))
    if node.rank(0) != 3:
        return emit_output(e, node, "Identity", y)
    return emit_output(e, node, "Reshape", e("Transpose", y, perm=(0, 2, 1, 3)), int64s(e, 0, 0, -1))


def rotate_first_elements(e: Emitter, node: OnnxNode, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """x [B,N,S,D], with the first R elements of each head rotated by angles with cosines and sines [B,1,S,R/2].

    A rotated pair is two adjacent elements if `interleaved`, otherwise elements i and i + R/2. UnsupportedError unless
    R and D are known.
    """
    half, size = cos.shape[-1], x.shape[-1]
    if not isinstance(half, int) or not isinstance(size, int):
        raise UnsupportedError("needs to know the size of a head", where=node.where)
    if 2 * half == size:
        return _rotate(e, node, x, cos, sin, interleaved)
    first, rest = split(e, node, x, [int64s(e, 2 * half), int64s(e, size - 2 * half)], -1)
    return e("Concat", _rotate(e, node, first, cos, sin, interleaved), rest, axis=-1)


def _rotate(e: Emitter, node: OnnxNode, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """x [B,N,S,D] rotated by angles with cosines and sines [B,1,S,D/2].

    A rotated pair is two adjacent elements if `interleaved`, otherwise elements i and i + D/2.
    """
    if interleaved:
        pairs = e("Reshape", x, int64s(e, 0, 0, 0, -1, 2))
        a, b = (e("Gather", pairs, e.constant(i, dtype=DType.INT64), axis=-1) for i in (0, 1))
    else:
        a, b = split(e, node, x, [e("Shape", cos, start=-1)] * 2, -1)
    real = e("Sub", e("Mul", a, cos), e("Mul", b, sin))
    imaginary = e("Add", e("Mul", a, sin), e("Mul", b, cos))
    if not interleaved:
        return e("Concat", real, imaginary, axis=-1)
    joined = e("Concat", *(e("Unsqueeze", each, int64s(e, -1)) for each in (real, imaginary)), axis=-1)
    return e("Reshape", joined, int64s(e, 0, 0, 0, -1))
