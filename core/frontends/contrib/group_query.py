"""Grouped-query attention, with more heads of queries than of keys and values, as in models of ONNX Runtime GenAI.

Letters in shapes: B batch, S queries, P length of the past key cache, L length of the present one, K heads of keys, G
heads of queries per head of keys, D elements per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.attention import score_scale, split
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers, refuse_attributes
from lathe.core.frontends.contrib.rotary import rotate_first_elements
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType

_I64 = DType.INT64
# The indices of inputs; _ANGLES is the table of cosines, followed by that of sines.
_PAST, _LENGTHS, _TOTAL, _ANGLES, _POSITIONS, _BIAS, _SINK, _NORMS = 3, 5, 6, 7, 9, 10, 11, 14
_PAGED_POSITIONS = 7
PAGED_DOMAIN = "lathe.paged"
_UNSUPPORTED = {12: "k_scale", 13: "v_scale", 16: "query_seqlens"}


@lowers("GroupQueryAttention")
def _group_query_attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Causal attention over cached and new keys.

    The input `seqlens_k` [B] is the number of keys of each row, cached and new together, minus 1. In the present cache,
    the new keys of a row follow its cached ones; later entries of the past cache are unchanged. If the number of
    queries is the total number of keys, as for a prompt, no cached keys are used.
    """
    refuse_attributes(node, "qk_output", "kv_cache_bit_width", "sliding_window_cache")
    if not node.attrs.get("causal", 1):
        raise UnsupportedError("attribute 'causal' = 0 is not supported", where=node.where)
    for index, name in _UNSUPPORTED.items():
        if node.input(index) is not None:
            raise UnsupportedError(f"input {index} ({name}) is not supported", where=node.where)
    q, k, v = _heads(e, node)
    if node.input(_NORMS) is not None:
        q, k = (_normalize(e, node, x, index) for index, x in enumerate((q, k)))
    cached = _cached_count(e, node, q)
    if node.attrs.get("do_rotary"):
        q, k = (_rotate(e, node, x, cached) for x in (q, k))
    if node.input(_PAST) is not None:
        indices = _cache_indices(e, node, cached, k)
        k, v = (_present_cache(e, node.required(_PAST + i), new, indices) for i, new in enumerate((k, v)))
    found = _attention_output(e, node, q, k, v, cached)
    names = zip((k, v), node.outputs[1:3], strict=False)
    return [*found, *(_with_name(e, node, value, name) for value, name in names)]


@lowers("PagedGroupQueryAttention", domain=PAGED_DOMAIN)
def _paged_group_query_attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """GroupQueryAttention of n tokens of many sequences, [n,1,width], over a cache in pages.

    `lathe.core.language.paged_onnx` puts it in the place of GroupQueryAttention. Inputs 3 and 4 are the pages of keys
    and values, 5 and 6 the tables of cosines and sines, 7 to 10 the inputs `positions`, `sequences`, `slots` and
    `tables` of CacheWrite and CachedAttention. The results are that of attention, and the next pages.
    """
    q, k, v = _heads(e, node)
    positions = node.required(_PAGED_POSITIONS)
    if node.input(5) is not None:
        angles = (e("Gather", node.required(5 + i), positions) for i in range(2))
        cos, sin = (e("Unsqueeze", each, int64s(e, 1, 2)) for each in angles)
        interleaved = bool(node.attrs.get("rotary_interleaved"))
        q, k = (rotate_first_elements(e, node, x, cos, sin, interleaved) for x in (q, k))
    q, k, v = (e("Squeeze", x, int64s(e, 2)) for x in (q, k, v))
    names = (node.outputs[1], node.outputs[2])
    slots = node.required(_PAGED_POSITIONS + 2)
    keys = e.emit("CacheWrite", [node.required(3), k, slots], {"transposed": 1}, [names[0]], node.label)[0]
    values = e.emit("CacheWrite", [node.required(4), v, slots], {}, [names[1]], node.label)[0]
    size = q.shape[-1]
    assert isinstance(size, int)
    scale: Any = node.attrs.get("scale") or 1 / math.sqrt(size)
    window: Any = node.attrs.get("local_window_size", -1)
    sequences, tables = (node.required(_PAGED_POSITIONS + i) for i in (1, 3))
    found = e(
        "CachedAttention", q, keys, values, positions, sequences, tables, scale=float(scale), window=max(window, 0)
    )
    heads, _ = _head_counts(node)
    return [*emit_output(e, node, "Reshape", found, int64s(e, 0, 1, heads * size)), keys, values]


def _with_name(e: Emitter, node: OnnxNode, value: Value, name: str) -> Value:
    return e.emit("Identity", [value], {}, [name], node.label)[0] if name else value


def _heads(e: Emitter, node: OnnxNode) -> list[Value]:
    """Queries [B,G*K,S,D], keys and values [B,K,S,D], from three inputs or from one that has all three.

    UnsupportedError if the width of a single input is not known.
    """
    heads, shared = _head_counts(node)
    if node.input(1) is not None and node.input(2) is not None:
        given = [node.required(index) for index in range(3)]
    else:
        width = node.required(0).shape[-1]
        if not isinstance(width, int):
            raise UnsupportedError("needs to know the width of its queries", where=node.where)
        size = width // (heads + 2 * shared)
        sizes = [int64s(e, size * count) for count in (heads, shared, shared)]
        given = split(e, node, node.required(0), sizes, -1)
    return [
        e("Transpose", e("Reshape", x, int64s(e, 0, 0, count, -1)), perm=(0, 2, 1, 3))
        for x, count in zip(given, (heads, shared, shared), strict=True)
    ]


def _head_counts(node: OnnxNode) -> tuple[int, int]:
    """The numbers of heads of queries and of keys. UnsupportedError unless the second divides the first."""
    heads, shared = (node.attrs.get(name) for name in ("num_heads", "kv_num_heads"))
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1 or heads % shared:
        raise UnsupportedError(f"has {heads!r} heads of queries for {shared!r} of keys", where=node.where)
    return heads, shared


def _cached_count(e: Emitter, node: OnnxNode, q: Value) -> Value:
    """The number of cached keys that each row uses: int64 [B,1], or a single 0 if there are only new keys."""
    count = e("Shape", q, start=2, end=3)
    lengths = e("Add", e("Cast", node.required(_LENGTHS), to=_I64.onnx_code), e.constant(1, dtype=_I64))
    total = e("Cast", node.required(_TOTAL), to=_I64.onnx_code)
    past = e("Sub", e("Reshape", lengths, int64s(e, -1, 1)), count)
    return e("Where", e("Equal", e("Reshape", total, int64s(e, 1)), count), int64s(e, 0), past)


def _range(e: Emitter, size: Value) -> Value:
    """The integers from 0 to `size` - 1 as int64, for a `size` of type int64 [1]."""
    return e("Range", e.constant(0, dtype=_I64), e("Squeeze", size), e.constant(1, dtype=_I64))


def _normalize(e: Emitter, node: OnnxNode, x: Value, index: int) -> Value:
    """Queries (`index` 0) or keys (1) x after RMSNormalization of each head, scaled by input 14 or 15."""
    own = ("q_norm_epsilon", "k_norm_epsilon")[index]
    epsilon = node.attrs.get(own, node.attrs.get("qk_norm_epsilon", 1e-6))
    return e("RMSNormalization", x, node.required(_NORMS + index), epsilon=epsilon)


def _rotate(e: Emitter, node: OnnxNode, x: Value, cached: Value) -> Value:
    """x [B,heads,S,D] rotated by the angles of its positions, which are `position_ids` or start at `cached`.

    If the tables of cosines and sines are narrower than D / 2, only the first elements of each head are rotated.
    """
    position_ids = node.input(_POSITIONS)
    if position_ids is None:
        position_ids = e("Add", cached, _range(e, e("Shape", x, start=2, end=3)))
    tables = [node.required(index) for index in (_ANGLES, _ANGLES + 1)]
    cos, sin = (e("Unsqueeze", e("Gather", table, position_ids), int64s(e, 1)) for table in tables)
    return rotate_first_elements(e, node, x, cos, sin, bool(node.attrs.get("rotary_interleaved")))


def _cache_indices(e: Emitter, node: OnnxNode, cached: Value, k: Value) -> Value:
    """For each entry of the present cache, its index in the concatenation of past cache [B,K,P,D] and new keys `k`.

    int64 [B,K,L,1], as GatherND needs it. `cached` is the number of cached keys of each row.
    """
    past, new = (e("Shape", x, start=2, end=3) for x in (node.required(_PAST), k))
    total = e("Reshape", e("Cast", node.required(_TOTAL), to=_I64.onnx_code), int64s(e, 1))
    entry = _range(e, e("Max", past, total))
    new_index = e("Sub", entry, cached)
    is_new = e("And", e("GreaterOrEqual", new_index, int64s(e, 0)), e("Less", new_index, new))
    found = e("Where", is_new, e("Add", new_index, past), entry)
    found = e("Min", found, e("Sub", e("Add", past, new), int64s(e, 1)))
    return e("Expand", e("Unsqueeze", found, int64s(e, 1, 3)), int64s(e, 1, _head_counts(node)[1], 1, 1))


def _present_cache(e: Emitter, past: Value, new: Value, indices: Value) -> Value:
    """The present cache, [B,K,L,D]: the entries `indices` (of `_cache_indices`) of `past` followed by `new`."""
    return e("GatherND", e("Concat", past, new, axis=2), indices, batch_dims=2)


def _attention_output(e: Emitter, node: OnnxNode, q: Value, k: Value, v: Value, cached: Value) -> list[Value]:
    """Emit the first output, [B,S,G*K*D]: attention of q [B,G*K,S,D] over k and v [B,K,L,D].

    The queries of all heads that share keys are rows of one matrix product.
    """
    heads, shared = _head_counts(node)
    grouped = e("Reshape", q, int64s(e, 0, shared, -1, 0))
    scores = e("Mul", e("MatMul", grouped, e("Transpose", k, perm=(0, 1, 3, 2))), score_scale(e, node, q))
    scores = e("Reshape", scores, int64s(e, 0, heads, -1, 0))
    if cap := node.attrs.get("softcap"):
        limit = constant(e, cap, scores)
        scores = e("Mul", e("Tanh", e("Div", scores, limit)), limit)
    if (bias := node.input(_BIAS)) is not None:
        scores = e("Add", scores, bias)
    scores = e("Where", _attended_keys(e, node, q, k, cached), scores, constant(e, -np.inf, scores))
    weights = _attention_weights(e, node, scores)
    y = e("MatMul", e("Reshape", weights, int64s(e, 0, shared, -1, 0)), v)
    y = e("Transpose", e("Reshape", y, int64s(e, 0, heads, -1, 0)), perm=(0, 2, 1, 3))
    return emit_output(e, node, "Reshape", y, int64s(e, 0, 0, -1))


def _attention_weights(e: Emitter, node: OnnxNode, scores: Value) -> Value:
    """The softmax of scores [B,heads,S,L] over L. An attention sink, if any, adds a further score to its denominator.

    The sink is an input with a score per head; without it, it is 0 if the attribute `smooth_softmax` is 1.
    """
    head_sink, smooth = node.input(_SINK), node.attrs.get("smooth_softmax", -1)
    if head_sink is None and smooth != 1:
        return e("Softmax", scores, axis=-1)
    sink = constant(e, 0.0, scores) if head_sink is None else e("Reshape", head_sink, int64s(e, 1, -1, 1, 1))
    most = e("Max", e("ReduceMax", scores, int64s(e, -1), keepdims=1), sink)
    powers = e("Exp", e("Sub", scores, most))
    total = e("Add", e("ReduceSum", powers, int64s(e, -1), keepdims=1), e("Exp", e("Sub", sink, most)))
    return e("Div", powers, total)


def _attended_keys(e: Emitter, node: OnnxNode, q: Value, k: Value, cached: Value) -> Value:
    """Whether a query attends to a key: bool [B,1,S,L], true for keys up to the query's own position.

    With `local_window_size` w, only for the last w of these keys. `cached` is the number of keys before the queries.
    """
    own = e("Unsqueeze", e("Add", cached, _range(e, e("Shape", q, start=2, end=3))), int64s(e, 1, 3))
    keys = _range(e, e("Shape", k, start=2, end=3))
    found = e("LessOrEqual", keys, own)
    window: Any = node.attrs.get("local_window_size", -1)
    if window < 0:
        return found
    return e("And", found, e("Greater", keys, e("Sub", own, int64s(e, window))))
