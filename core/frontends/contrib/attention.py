"""Attention over several heads, and embeddings, in terms of products and Softmax.

Letters in shapes: B batch, S queries, P keys kept from before, T = P + new keys, N heads, D numbers per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from core.errors import UnsupportedError
from core.frontends.contrib.quantized import dequantized, integer_product
from core.frontends.contrib.table import constant, int64s, last, lowers, refuse
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Value
from core.ir.types import DType

_MASKED = -10000.0
_EPSILON = 9.999999960041972e-13  # 1e-12 as float32


@lowers("Attention")
def _attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Self-attention of [B,S,K] with one weight [K,3*N*D] for queries, keys and values.

    The mask is int32: keys to attend to, [B] (their number), [B,T] or [B,S,T]. `past` and `present` are [2,B,N,P,D].
    """
    x = e("MatMul", node.required(0), node.required(1))
    x = x if (bias := node.input(2)) is None else e("Add", x, bias)
    return _self_attention(e, node, x, node.input(3), node.input(4), node.input(5))


@lowers("QAttention")
def _quantized_attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """The same with input and weight of bytes: inputs x, weight, bias, their scales, mask, their zero points, past."""
    x = integer_product(e, node, (0, 3, 6), (1, 4, 7))
    return _self_attention(e, node, e("Add", x, node.required(2)), node.input(5), node.input(8), None)


def _self_attention(
    e: Emitter, node: OnnxNode, x: Value, mask: Value | None, past: Value | None, bias: Value | None
) -> list[Value]:
    """The outputs for queries, keys and values side by side in x [B,S,3*N*D]."""
    refuse(node, "do_rotary", "past_present_share_buffer")
    q, k, v = (_heads(e, node, part) for part in _parts(e, node, x))
    if past is not None:
        k, v = (e("Concat", _at(e, past, i), new, axis=2) for i, new in enumerate((k, v)))
    y = _attended(e, node, q, k, v, _bias(e, node, q, k, mask, bias))
    if len(node.outputs) < 2:
        return y
    stacked = (e("Unsqueeze", each, int64s(e, 0)) for each in (k, v))
    return [*y, e.emit("Concat", list(stacked), {"axis": 0}, node.outputs[1:2], node.label)[0]]


@lowers("MultiHeadAttention")
def _multi_head_attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Attention of [B,S,N*D] over keys and values [B,L,N*D], or [B,N,L,D] as another node has left them."""
    if node.input(1) is None or node.input(2) is None or node.rank(0) != 3:
        raise UnsupportedError("has its queries, keys and values in one tensor, expected three", where=node.where)
    given = [node.required(index) for index in range(3)]
    if (bias := node.input(3)) is not None:
        parts = split(e, node, bias, [e("Shape", value, start=-1) for value in given], 0)
        given = [e("Add", value, part) for value, part in zip(given, parts, strict=True)]
    q, k, v = (value if value.tensor.rank == 4 else _heads(e, node, value) for value in given)
    if (past_k := node.input(6)) is not None and (past_v := node.input(7)) is not None:
        k, v = e("Concat", past_k, k, axis=2), e("Concat", past_v, v, axis=2)
    y = _attended(e, node, q, k, v, _bias(e, node, q, k, node.input(4), node.input(5)))
    kept = zip((k, v), node.outputs[1:3], strict=False)
    return [*y, *(e.emit("Identity", [value], {}, [name], node.label)[0] for value, name in kept)]


def _parts(e: Emitter, node: OnnxNode, x: Value) -> list[Value]:
    """Queries, keys and values, side by side in the last axis."""
    sizes: Any = node.attrs.get("qkv_hidden_sizes")
    if sizes is None:
        width = x.shape[-1]
        if not isinstance(width, int):
            raise UnsupportedError("needs to know the width of its weight", where=node.where)
        sizes = [width // 3] * 3
    return split(e, node, x, [int64s(e, size) for size in sizes], -1)


def split(e: Emitter, node: OnnxNode, x: Value, sizes: Sequence[Value], axis: int) -> list[Value]:
    """Parts of these sizes, int64 [1] each."""
    names = [e.session.fresh(f"{node.label}.part") for _ in sizes]
    return e.emit("Split", [x, e("Concat", *sizes, axis=0)], {"axis": axis}, names, node.label)


def _heads(e: Emitter, node: OnnxNode, x: Value) -> Value:
    """[B,S,N*D] to [B,N,S,D]."""
    heads: Any = node.attrs.get("num_heads")
    return e("Transpose", e("Reshape", x, int64s(e, 0, 0, heads, -1)), perm=(0, 2, 1, 3))


def _at(e: Emitter, x: Value, index: int) -> Value:
    return e("Gather", x, e.constant(index, dtype=DType.INT64), axis=0)


def _attended(e: Emitter, node: OnnxNode, q: Value, k: Value, v: Value, bias: Value | None) -> list[Value]:
    """The first output, [B,S,N*D]: softmax(q @ k^T * scale + bias) @ v."""
    scores = e("Mul", e("MatMul", q, e("Transpose", k, perm=(0, 1, 3, 2))), scale_of(e, node, q))
    scores = scores if bias is None else e("Add", scores, bias)
    y = e("Transpose", e("MatMul", e("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
    return last(e, node, "Reshape", y, int64s(e, 0, 0, -1))


def scale_of(e: Emitter, node: OnnxNode, q: Value) -> Value:
    """The factor of the products of queries q [B,N,S,D] and keys: the attribute `scale`, or 1 / sqrt(D)."""
    given: Any = node.attrs.get("scale", 0.0)
    depth = q.shape[-1]
    if given:
        return constant(e, given, q)
    if isinstance(depth, int):
        return constant(e, depth**-0.5, q)
    size = e("Cast", e("Shape", q, start=3, end=4), to=DType.FLOAT32.onnx_code)
    return e("Cast", e("Reciprocal", e("Sqrt", size)), to=q.dtype.onnx_code)


def _bias(e: Emitter, node: OnnxNode, q: Value, k: Value, mask: Value | None, given: Value | None) -> Value | None:
    """What is added to the scores [B,N,S,T]: the mask, the order of steps, and a bias that the node is given."""
    found = [] if given is None else [given]
    if mask is not None:
        found.append(_mask_bias(e, node, _keep(e, node, mask, k), q))
    if node.attrs.get("unidirectional"):
        found.append(_mask_bias(e, node, _earlier(e, q, k), q))
    return reduce(lambda a, b: e("Add", a, b), found) if found else None


def _mask_bias(e: Emitter, node: OnnxNode, keep: Value, like: Value) -> Value:
    """0 where `keep` is true, else `mask_filter_value`."""
    filtered = constant(e, node.attrs.get("mask_filter_value", _MASKED), like)
    return e("Where", keep, constant(e, 0.0, like), filtered)


def _keep(e: Emitter, node: OnnxNode, mask: Value, k: Value) -> Value:
    """Which keys to attend to, as bool [B,1,1,T] or [B,1,S,T]."""
    match mask.tensor.rank:
        case 1:
            ends = e("Unsqueeze", e("Cast", mask, to=DType.INT64.onnx_code), int64s(e, 1, 2, 3))
            return e("Less", positions(e, k), ends)
        case 2 | 3 as rank:
            axes = int64s(e, 1, 2) if rank == 2 else int64s(e, 1)
            return e("Cast", e("Unsqueeze", mask, axes), to=DType.BOOL.onnx_code)
    raise UnsupportedError(f"has a mask {mask.type}, expected rank 1 to 3", where=node.where)


def positions(e: Emitter, x: Value) -> Value:
    """0, 1 .. along the third axis of [B,N,T,D], as int64 [T]."""
    size = e("Squeeze", e("Shape", x, start=2, end=3))
    return e("Range", e.constant(0, dtype=DType.INT64), size, e.constant(1, dtype=DType.INT64))


def _earlier(e: Emitter, q: Value, k: Value) -> Value:
    """Whether a key is no later than a query, the last of which is the last of the keys: bool [S,T]."""
    ahead = e("Sub", e("Shape", k, start=2, end=3), e("Shape", q, start=2, end=3))
    queries = e("Unsqueeze", e("Add", positions(e, q), ahead), int64s(e, 1))
    return e("LessOrEqual", positions(e, k), queries)


@lowers("EmbedLayerNormalization")
def _embed_layer_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """LayerNormalization of the sum of embeddings of words, places and segments; the mask as numbers of words."""
    ids, segments = node.required(0), node.input(1)
    places = node.input(8)
    if places is None:
        places = _places(e, ids)
    rows = [e("Gather", node.required(2), ids), e("Gather", node.required(3), places)]
    if segments is not None and (table := node.input(4)) is not None:
        rows.append(e("Gather", table, segments))
    return _embedded(e, node, rows, node.required(5), node.required(6))


@lowers("QEmbedLayerNormalization")
def _quantized_embed_layer_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """The same with tables, gamma and beta of bytes: inputs 2 to 6, their scales from 8 on, zero points from 13 on."""
    ids, segments = node.required(0), node.input(1)

    def real(index: int, picked: Value | None = None) -> Value:
        x = node.required(index)
        x = x if picked is None else e("Gather", x, picked)
        return dequantized(e, x, node.required(index + 6), node.required(index + 11))

    rows = [real(2, ids), real(3, _places(e, ids))]
    if segments is not None and node.input(4) is not None:
        rows.append(real(4, segments))
    return _embedded(e, node, rows, real(5), real(6))


def _places(e: Emitter, ids: Value) -> Value:
    """0, 1 .. for each word of [B,S]."""
    zero, one = (e.constant(i, dtype=DType.INT64) for i in (0, 1))
    return e("Range", zero, e("Squeeze", e("Shape", ids, start=1, end=2)), one)


def _embedded(e: Emitter, node: OnnxNode, rows: Sequence[Value], gamma: Value, beta: Value) -> list[Value]:
    """The outputs: the normalized sum of rows, the number of words that the mask leaves, the sum."""
    ids, mask = node.required(0), node.input(7)
    total = reduce(lambda a, b: e("Add", a, b), rows)
    epsilon = node.attrs.get("epsilon", _EPSILON)
    found = last(e, node, "LayerNormalization", total, gamma, beta, epsilon=epsilon)
    if len(node.outputs) > 1:
        counted = e("Mul", ids, constant(e, 0, ids)) if mask is None else mask
        found = [*found, _named(e, node, 1, e("ReduceSum", counted, int64s(e, 1), keepdims=0))]
    return found if len(node.outputs) < 3 else [*found, _named(e, node, 2, total)]


def _named(e: Emitter, node: OnnxNode, output: int, value: Value) -> Value:
    return e.emit("Identity", [value], {}, node.outputs[output : output + 1], node.label)[0]
