"""Rotary positions: pairs of numbers turned by angles that depend on the place.

Letters in shapes: B batch, S steps, N heads, D numbers per head, R of which are turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.errors import ModelError, UnsupportedError
from core.frontends.contrib.attention import positions, split
from core.frontends.contrib.table import constant, int64s, last, lowers, refuse
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Value
from core.ir.types import DType

_STREAMS = 3  # of places: time, height, width


@lowers("RotaryEmbedding")
def _rotary(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """x [B,S,N*D] or [B,N,S,D] turned by the angles of its places: [B,S], or the first of all, [1]."""
    refuse(node, "is_packed_batching")
    x, places = _heads(e, node), node.required(1)
    if node.rank(1) == 1:
        places = e("Unsqueeze", e("Add", positions(e, x), places), int64s(e, 0))
    cos, sin = (e("Unsqueeze", e("Gather", node.required(index), places), int64s(e, 1)) for index in (2, 3))
    return _result(e, node, x, cos, sin)


@lowers("MRotaryEmbedding")
def _rotary_of_streams(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """The same for places [3,B,S] in time, height and width: each pair of numbers is turned by one of the three."""
    refuse(node, "is_packed_batching")
    stream = _streams(node, _half(node))
    cos, sin = (_chosen(e, e("Gather", node.required(index), node.required(1)), stream) for index in (2, 3))
    if (scale := node.attrs.get("scale", 1.0)) != 1.0:
        cos, sin = (e("Mul", each, constant(e, scale, each)) for each in (cos, sin))
    return _result(e, node, _heads(e, node), cos, sin)


def _chosen(e: Emitter, tables: Value, stream: Any) -> Value:
    """Each column of [3,B,S,R/2] from its stream: [B,1,S,R/2]."""
    first, *others = (e("Gather", tables, e.constant(number), axis=0) for number in np.arange(_STREAMS))
    for number, other in enumerate(others, start=1):
        first = e("Where", e.constant(stream == number), other, first)
    return e("Unsqueeze", first, int64s(e, 1))


def _streams(node: OnnxNode, half: int) -> Any:
    """Which stream turns each pair: parts one after the other, or with layout 1 every third pair of as many."""
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
    """R / 2: the width of the tables."""
    width = node.required(2).shape[-1]
    if not isinstance(width, int):
        raise UnsupportedError("needs to know the size of a head", where=node.where)
    return width


def _heads(e: Emitter, node: OnnxNode) -> Value:
    """The first input as [B,N,S,D]. Where less than a head is turned, `num_heads` says how many there are."""
    x, heads = node.required(0), node.attrs.get("num_heads", 0)
    if node.rank(0) != 3:
        return x
    shape = (heads, -1) if isinstance(heads, int) and heads else (-1, 2 * _half(node))
    if node.attrs.get("rotary_embedding_dim", 0) and shape[0] == -1:
        raise ModelError("has rotary_embedding_dim without num_heads", where=node.where)
    return e("Transpose", e("Reshape", x, int64s(e, 0, 0, *shape)), perm=(0, 2, 1, 3))


def _result(e: Emitter, node: OnnxNode, x: Value, cos: Value, sin: Value) -> list[Value]:
    """The output, of the first input's shape."""
    y = turned_in_part(e, node, x, cos, sin, bool(node.attrs.get("interleaved")))
    if node.rank(0) != 3:
        return last(e, node, "Identity", y)
    return last(e, node, "Reshape", e("Transpose", y, perm=(0, 2, 1, 3)), int64s(e, 0, 0, -1))


def turned_in_part(e: Emitter, node: OnnxNode, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """x [B,N,S,D], of which the first R numbers are turned by angles whose cosines and sines are [B,1,S,R/2]."""
    half, size = cos.shape[-1], x.shape[-1]
    if not isinstance(half, int) or not isinstance(size, int):
        raise UnsupportedError("needs to know the size of a head", where=node.where)
    if 2 * half == size:
        return _turned(e, node, x, cos, sin, interleaved)
    first, rest = split(e, node, x, [int64s(e, 2 * half), int64s(e, size - 2 * half)], -1)
    return e("Concat", _turned(e, node, first, cos, sin, interleaved), rest, axis=-1)


def _turned(e: Emitter, node: OnnxNode, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """x [B,N,S,D] turned by angles whose cosines and sines are [B,1,S,D/2]: pairs of neighbours, or of halves."""
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
