"""Attention whose queries have more heads than its keys and values: what models of ONNX Runtime GenAI are made of.

Letters in shapes: B batch, S queries, P places of the keys kept from before, L places of those kept afterwards, K heads
of keys, G heads of queries for each of them, D numbers per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.errors import UnsupportedError
from core.frontends.contrib.attention import scale_of, split
from core.frontends.contrib.rotary import turned_in_part
from core.frontends.contrib.table import constant, int64s, last, lowers, refuse
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Value
from core.ir.types import DType

_I64 = DType.INT64
_PAST, _LENGTHS, _TOTAL, _ANGLES, _PLACES, _BIAS, _SINK, _NORMS = 3, 5, 6, 7, 9, 10, 11, 14
_REFUSED = {12: "k_scale", 13: "v_scale", 16: "query_seqlens"}


@lowers("GroupQueryAttention")
def _group_query_attention(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Attention over keys kept from before and new ones, each query over those up to its own place.

    `seqlens_k` [B] counts the keys of each row, less one. Row b keeps `before` of its keys from the past, the new ones
    follow; what lies behind them in the past stays as it is. A prompt has as many queries as keys in all, and no past.
    """
    refuse(node, "qk_output", "kv_cache_bit_width", "sliding_window_cache")
    if not node.attrs.get("causal", 1):
        raise UnsupportedError("attribute 'causal' = 0 is not supported", where=node.where)
    for index, name in _REFUSED.items():
        if node.input(index) is not None:
            raise UnsupportedError(f"input {index} ({name}) is not supported", where=node.where)
    q, k, v = _given(e, node)
    if node.input(_NORMS) is not None:
        q, k = (_normalized(e, node, x, index) for index, x in enumerate((q, k)))
    before = _before(e, node, q)
    if node.attrs.get("do_rotary"):
        q, k = (_rotated(e, node, x, before) for x in (q, k))
    if node.input(_PAST) is not None:
        places = _kept_places(e, node, before, k)
        k, v = (_joined(e, node.required(_PAST + i), new, places) for i, new in enumerate((k, v)))
    found = _attended(e, node, q, k, v, before)
    names = zip((k, v), node.outputs[1:3], strict=False)
    return [*found, *(_named(e, node, value, name) for value, name in names)]


def _named(e: Emitter, node: OnnxNode, value: Value, name: str) -> Value:
    return e.emit("Identity", [value], {}, [name], node.label)[0] if name else value


def _given(e: Emitter, node: OnnxNode) -> list[Value]:
    """Queries [B,G*K,S,D], keys and values [B,K,S,D], from three inputs or from one."""
    heads, shared = _counts(node)
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


def _counts(node: OnnxNode) -> tuple[int, int]:
    """How many heads queries have, and keys."""
    heads, shared = (node.attrs.get(name) for name in ("num_heads", "kv_num_heads"))
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1 or heads % shared:
        raise UnsupportedError(f"has {heads!r} heads of queries for {shared!r} of keys", where=node.where)
    return heads, shared


def _before(e: Emitter, node: OnnxNode, q: Value) -> Value:
    """How many keys of each row are kept from the past: int64 [B,1]."""
    count = e("Shape", q, start=2, end=3)
    lengths = e("Add", e("Cast", node.required(_LENGTHS), to=_I64.onnx_code), e.constant(1, dtype=_I64))
    total = e("Cast", node.required(_TOTAL), to=_I64.onnx_code)
    past = e("Sub", e("Reshape", lengths, int64s(e, -1, 1)), count)
    return e("Where", e("Equal", e("Reshape", total, int64s(e, 1)), count), int64s(e, 0), past)


def _range(e: Emitter, size: Value) -> Value:
    """0, 1 .. as int64, as many as an int64 [1] says."""
    return e("Range", e.constant(0, dtype=_I64), e("Squeeze", size), e.constant(1, dtype=_I64))


def _normalized(e: Emitter, node: OnnxNode, x: Value, index: int) -> Value:
    """Queries (index 0) or keys (1) after RMSNormalization of each head."""
    own = ("q_norm_epsilon", "k_norm_epsilon")[index]
    epsilon = node.attrs.get(own, node.attrs.get("qk_norm_epsilon", 1e-6))
    return e("RMSNormalization", x, node.required(_NORMS + index), epsilon=epsilon)


def _rotated(e: Emitter, node: OnnxNode, x: Value, before: Value) -> Value:
    """x [B,.,S,D] turned by the angles of its places; where those are of fewer numbers, only the first of D."""
    places = node.input(_PLACES)
    if places is None:
        places = e("Add", before, _range(e, e("Shape", x, start=2, end=3)))
    tables = [node.required(index) for index in (_ANGLES, _ANGLES + 1)]
    cos, sin = (e("Unsqueeze", e("Gather", table, places), int64s(e, 1)) for table in tables)
    return turned_in_part(e, node, x, cos, sin, bool(node.attrs.get("rotary_interleaved")))


def _kept_places(e: Emitter, node: OnnxNode, before: Value, k: Value) -> Value:
    """Where each kept key stands in the past [B,K,P,D] and the new ones behind it: int64 [B,K,L,1]."""
    past, new = (e("Shape", x, start=2, end=3) for x in (node.required(_PAST), k))
    total = e("Reshape", e("Cast", node.required(_TOTAL), to=_I64.onnx_code), int64s(e, 1))
    place = _range(e, e("Max", past, total))
    ahead = e("Sub", place, before)
    is_new = e("And", e("GreaterOrEqual", ahead, int64s(e, 0)), e("Less", ahead, new))
    found = e("Where", is_new, e("Add", ahead, past), place)
    found = e("Min", found, e("Sub", e("Add", past, new), int64s(e, 1)))
    return e("Expand", e("Unsqueeze", found, int64s(e, 1, 3)), int64s(e, 1, _counts(node)[1], 1, 1))


def _joined(e: Emitter, past: Value, new: Value, places: Value) -> Value:
    """The past and what is new, as far as it is kept: [B,K,L,D]."""
    return e("GatherND", e("Concat", past, new, axis=2), places, batch_dims=2)


def _attended(e: Emitter, node: OnnxNode, q: Value, k: Value, v: Value, before: Value) -> list[Value]:
    """The first output, [B,S,G*K*D]. Queries of the heads that share keys are rows of one product."""
    heads, shared = _counts(node)
    together = e("Reshape", q, int64s(e, 0, shared, -1, 0))
    scores = e("Mul", e("MatMul", together, e("Transpose", k, perm=(0, 1, 3, 2))), scale_of(e, node, q))
    scores = e("Reshape", scores, int64s(e, 0, heads, -1, 0))
    if cap := node.attrs.get("softcap"):
        limit = constant(e, cap, scores)
        scores = e("Mul", e("Tanh", e("Div", scores, limit)), limit)
    if (bias := node.input(_BIAS)) is not None:
        scores = e("Add", scores, bias)
    scores = e("Where", _keep(e, node, q, k, before), scores, constant(e, -np.inf, scores))
    weights = _weights(e, node, scores)
    y = e("MatMul", e("Reshape", weights, int64s(e, 0, shared, -1, 0)), v)
    y = e("Transpose", e("Reshape", y, int64s(e, 0, heads, -1, 0)), perm=(0, 2, 1, 3))
    return last(e, node, "Reshape", y, int64s(e, 0, 0, -1))


def _weights(e: Emitter, node: OnnxNode, scores: Value) -> Value:
    """The softmax of scores [B,N,S,L], in which a sink takes part: a score per head, or 0 with `smooth_softmax`."""
    given, smooth = node.input(_SINK), node.attrs.get("smooth_softmax", -1)
    if given is None and smooth != 1:
        return e("Softmax", scores, axis=-1)
    sink = constant(e, 0.0, scores) if given is None else e("Reshape", given, int64s(e, 1, -1, 1, 1))
    most = e("Max", e("ReduceMax", scores, int64s(e, -1), keepdims=1), sink)
    powers = e("Exp", e("Sub", scores, most))
    total = e("Add", e("ReduceSum", powers, int64s(e, -1), keepdims=1), e("Exp", e("Sub", sink, most)))
    return e("Div", powers, total)


def _keep(e: Emitter, node: OnnxNode, q: Value, k: Value, before: Value) -> Value:
    """Whether a query looks at a key: bool [B,1,S,L]. A window counts the query's own place."""
    own = e("Unsqueeze", e("Add", before, _range(e, e("Shape", q, start=2, end=3))), int64s(e, 1, 3))
    keys = _range(e, e("Shape", k, start=2, end=3))
    found = e("LessOrEqual", keys, own)
    window: Any = node.attrs.get("local_window_size", -1)
    if window < 0:
        return found
    return e("And", found, e("Greater", keys, e("Sub", own, int64s(e, window))))
