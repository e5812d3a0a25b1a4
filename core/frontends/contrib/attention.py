"""Multi-head attention and embeddings, as matrix products and Softmax.

Letters in shapes: B batch, S queries, P past keys, T = P + new keys, N heads, D elements per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers, refuse_attributes
from lathe.core.frontends.contrib.quantized import dequantize, integer_product
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType

_MASKED = -10000.0
_EPSILON = 9.999999960041972e-13  # 1e-12 as float32


@lowers("Attention")
def _attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Self-attention of an input [B,S,K] with one weight [K,3*N*D] for queries, keys and values; returns the outputs.

    The mask is int32 and selects the keys to attend to: [B] (the number of keys), [B,T] or [B,S,T]. `past` is
    [2,B,N,P,D], `present` is [2,B,N,T,D].
    """
    x = e("MatMul", node.required(0), node.required(1))
    x = x if (bias := node.input(2)) is None else e("Add", x, bias)
    return _self_attention(e, node, x, node.input(3), node.input(4), node.input(5))


@lowers("QAttention")
def _quantized_attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Attention with quantized x and weight.

    Inputs: x, weight, bias, scale of x, scale of the weight, mask, zero point of x, zero point of the weight, past.
    """
    x = integer_product(e, node, (0, 3, 6), (1, 4, 7))
    return _self_attention(e, node, e("Add", x, node.required(2)), node.input(5), node.input(8), None)


def _self_attention(
    e: Emitter, node: OnnxNode, x: Value, mask: Value | None, past: Value | None, bias: Value | None
) -> list[Value]:
    """The outputs of self-attention, for queries, keys and values concatenated along the last axis of x [B,S,3*N*D].

    They are the result [B,S,N*D] and, if the node has a second output, the keys and values with the cached ones of
    `past` before them, stacked: [2,B,N,T,D]. `bias` is added to the scores.
    """
    refuse_attributes(node, "do_rotary", "past_present_share_buffer")
    q, k, v = (_heads(e, node, part) for part in _parts(e, node, x))
    if past is not None:
        k, v = (e("Concat", _gather_index(e, past, i), new, axis=2) for i, new in enumerate((k, v)))
    y = _attention_output(e, node, q, k, v, _score_bias(e, node, q, k, mask, bias))
    if len(node.outputs) < 2:
        return y
    stacked = (e("Unsqueeze", each, int64s(e, 0)) for each in (k, v))
    return [*y, e.emit("Concat", list(stacked), {"axis": 0}, node.outputs[1:2], node.label)[0]]


@lowers("MultiHeadAttention")
def _multi_head_attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Attention of queries [B,S,N*D] over keys and values, [B,L,N*D] or already split into heads, [B,N,L,D].

    Cached keys and values (inputs 6 and 7) are put before them; outputs 1 and 2 are the concatenations.
    UnsupportedError if queries, keys and values are not three inputs.
    """
    if node.input(1) is None or node.input(2) is None or node.rank(0) != 3:
        raise UnsupportedError("has its queries, keys and values in one tensor, expected three", where=node.where)
    given = [node.required(index) for index in range(3)]
    if (bias := node.input(3)) is not None:
        parts = split(e, node, bias, [e("Shape", value, start=-1) for value in given], 0)
        given = [e("Add", value, part) for value, part in zip(given, parts, strict=True)]
    q, k, v = (value if value.tensor.rank == 4 else _heads(e, node, value) for value in given)
    if (past_k := node.input(6)) is not None and (past_v := node.input(7)) is not None:
        k, v = e("Concat", past_k, k, axis=2), e("Concat", past_v, v, axis=2)
    y = _attention_output(e, node, q, k, v, _score_bias(e, node, q, k, node.input(4), node.input(5)))
    present = zip((k, v), node.outputs[1:3], strict=False)
    return [*y, *(e.emit("Identity", [value], {}, [name], node.label)[0] for value, name in present)]


def _parts(e: Emitter, node: OnnxNode, x: Value) -> list[Value]:
    """Split `x` into queries, keys and values, which are concatenated along its last axis.

    Their widths are the attribute `qkv_hidden_sizes`, or a third each; UnsupportedError if the axis has no known width.
    """
    sizes: Any = node.attrs.get("qkv_hidden_sizes")
    if sizes is None:
        width = x.shape[-1]
        if not isinstance(width, int):
            raise UnsupportedError("needs to know the width of its weight", where=node.where)
        sizes = [width // 3] * 3
    return split(e, node, x, [int64s(e, size) for size in sizes], -1)


def split(e: Emitter, node: OnnxNode, x: Value, sizes: Sequence[Value], axis: int) -> list[Value]:
    """Split `x` along `axis` into parts of these sizes, each int64 [1]."""
    names = [e.session.fresh(f"{node.label}.part") for _ in sizes]
    return e.emit("Split", [x, e("Concat", *sizes, axis=0)], {"axis": axis}, names, node.label)


def _heads(e: Emitter, node: OnnxNode, x: Value) -> Value:
    """`x` [B,S,N*D] split into heads, [B,N,S,D]."""
    heads: Any = node.attrs.get("num_heads")
    return e("Transpose", e("Reshape", x, int64s(e, 0, 0, heads, -1)), perm=(0, 2, 1, 3))


def _gather_index(e: Emitter, x: Value, index: int) -> Value:
    return e("Gather", x, e.constant(index, dtype=DType.INT64), axis=0)


def _attention_output(e: Emitter, node: OnnxNode, q: Value, k: Value, v: Value, bias: Value | None) -> list[Value]:
    """Emit the first output, [B,S,N*D]: softmax(q @ k^T * scale + bias) @ v with the heads side by side."""
    scores = e("Mul", e("MatMul", q, e("Transpose", k, perm=(0, 1, 3, 2))), score_scale(e, node, q))
    scores = scores if bias is None else e("Add", scores, bias)
    y = e("Transpose", e("MatMul", e("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
    return emit_output(e, node, "Reshape", y, int64s(e, 0, 0, -1))


def score_scale(e: Emitter, node: OnnxNode, q: Value) -> Value:
    """The factor of the scores for queries q [B,N,S,D]: the attribute `scale`; 1 / sqrt(D) if it is absent or 0."""
    given: Any = node.attrs.get("scale", 0.0)
    depth = q.shape[-1]
    if given:
        return constant(e, given, q)
    if isinstance(depth, int):
        return constant(e, depth**-0.5, q)
    size = e("Cast", e("Shape", q, start=3, end=4), to=DType.FLOAT32.onnx_code)
    return e("Cast", e("Reciprocal", e("Sqrt", size)), to=q.dtype.onnx_code)


def _score_bias(e: Emitter, node: OnnxNode, q: Value, k: Value, mask: Value | None, bias: Value | None) -> Value | None:
    """The term to add to the scores: the sum of `bias`, `mask` and a causal mask; None if all three are absent.

    Both masks become additive (`_mask_bias`). There is a causal mask if the attribute `unidirectional` is set.
    """
    terms = [] if bias is None else [bias]
    if mask is not None:
        terms.append(_mask_bias(e, node, _attended_keys(e, node, mask, k), q))
    if node.attrs.get("unidirectional"):
        terms.append(_mask_bias(e, node, _causal_mask(e, q, k), q))
    return reduce(lambda a, b: e("Add", a, b), terms) if terms else None


def _mask_bias(e: Emitter, node: OnnxNode, keep: Value, like: Value) -> Value:
    """An additive mask of the type of `like`: 0 where `keep` is true, `mask_filter_value` (-10000) elsewhere."""
    filtered = constant(e, node.attrs.get("mask_filter_value", _MASKED), like)
    return e("Where", keep, constant(e, 0.0, like), filtered)


def _attended_keys(e: Emitter, node: OnnxNode, mask: Value, k: Value) -> Value:
    """Whether the mask lets each of the T keys `k` be attended to: bool [B,1,1,T], or [B,1,S,T] for a mask of rank 3.

    A mask of rank 1 has the number of keys of each row. UnsupportedError for ranks other than 1 to 3.
    """
    match mask.tensor.rank:
        case 1:
            ends = e("Unsqueeze", e("Cast", mask, to=DType.INT64.onnx_code), int64s(e, 1, 2, 3))
            return e("Less", positions(e, k), ends)
        case 2 | 3 as rank:
            axes = int64s(e, 1, 2) if rank == 2 else int64s(e, 1)
            return e("Cast", e("Unsqueeze", mask, axes), to=DType.BOOL.onnx_code)
    raise UnsupportedError(f"has a mask {mask.type}, expected rank 1 to 3", where=node.where)


def positions(e: Emitter, x: Value) -> Value:
    """The indices 0 to T - 1 of the third axis of `x` [B,N,T,D]: int64 [T]."""
    size = e("Squeeze", e("Shape", x, start=2, end=3))
    return e("Range", e.constant(0, dtype=DType.INT64), size, e.constant(1, dtype=DType.INT64))


def _causal_mask(e: Emitter, q: Value, k: Value) -> Value:
    """Whether a key is no later than a query: bool [S,T]. The last query is at the position of the last key."""
    past_length = e("Sub", e("Shape", k, start=2, end=3), e("Shape", q, start=2, end=3))
    queries = e("Unsqueeze", e("Add", positions(e, q), past_length), int64s(e, 1))
    return e("LessOrEqual", positions(e, k), queries)


@lowers("EmbedLayerNormalization")
def _embed_layer_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """LayerNormalization of the sum of word, position and segment embeddings.

    Output 1 is the sum of the mask for each sequence, that is its number of words, or 0 without a mask; output 2 is the
    sum of embeddings.
    """
    ids, segments = node.required(0), node.input(1)
    position_ids = node.input(8)
    if position_ids is None:
        position_ids = _default_position_ids(e, ids)
    rows = [e("Gather", node.required(2), ids), e("Gather", node.required(3), position_ids)]
    if segments is not None and (table := node.input(4)) is not None:
        rows.append(e("Gather", table, segments))
    return _embedding_outputs(e, node, rows, node.required(5), node.required(6))


@lowers("QEmbedLayerNormalization")
def _quantized_embed_layer_norm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """EmbedLayerNormalization with quantized tables, gamma and beta.

    These are inputs 2 to 6; their scales are inputs 8 to 12, their zero points inputs 13 to 17.
    """
    ids, segments = node.required(0), node.input(1)

    def dequantize_input(index: int, rows: Value | None = None) -> Value:
        x = node.required(index)
        x = x if rows is None else e("Gather", x, rows)
        return dequantize(e, x, node.required(index + 6), node.required(index + 11))

    rows = [dequantize_input(2, ids), dequantize_input(3, _default_position_ids(e, ids))]
    if segments is not None and node.input(4) is not None:
        rows.append(dequantize_input(4, segments))
    return _embedding_outputs(e, node, rows, dequantize_input(5), dequantize_input(6))


def _default_position_ids(e: Emitter, ids: Value) -> Value:
    """The positions 0 to S - 1 of the words in each sequence, for `ids` [B,S]: int64 [S]."""
    zero, one = (e.constant(i, dtype=DType.INT64) for i in (0, 1))
    return e("Range", zero, e("Squeeze", e("Shape", ids, start=1, end=2)), one)


def _embedding_outputs(e: Emitter, node: OnnxNode, rows: Sequence[Value], gamma: Value, beta: Value) -> list[Value]:
    """Those outputs that the node has: normalized sum of `rows`, sum of the mask per sequence, and sum of `rows`."""
    ids, mask = node.required(0), node.input(7)
    total = reduce(lambda a, b: e("Add", a, b), rows)
    epsilon = node.attrs.get("epsilon", _EPSILON)
    found = emit_output(e, node, "LayerNormalization", total, gamma, beta, epsilon=epsilon)
    if len(node.outputs) > 1:
        words = e("Mul", ids, constant(e, 0, ids)) if mask is None else mask
        found = [*found, _with_output_name(e, node, 1, e("ReduceSum", words, int64s(e, 1), keepdims=0))]
    return found if len(node.outputs) < 3 else [*found, _with_output_name(e, node, 2, total)]


def _with_output_name(e: Emitter, node: OnnxNode, output: int, value: Value) -> Value:
    return e.emit("Identity", [value], {}, node.outputs[output : output + 1], node.label)[0]
