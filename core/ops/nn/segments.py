"""Operators on packed sequences: the tokens of several sequences lie one after the other along an axis of extent n.

`offsets`, int64[n + 1], holds the index of the first token of each sequence. After the last sequence it is filled with
n, so that the number of sequences (at most n, as none is empty) needs no input of its own. Only
`passes/proofs/pack.py` emits these operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.nn.fused import FusedAttention, apply_epilogue, permuted_shape, transposed_view
from lathe.core.ops.opdef.registry import Call, Infer, OpDef, Required, register
from lathe.core.ops.opdef.type_rules import FLOAT, as_computed, check_kind, normalize_axis

_MADE_BY_PASSES = "only passes emit it, after differentiation"


def segments(offsets: Array) -> Iterator[slice]:
    """Yield the range of tokens of each sequence."""
    count = int(offsets[-1])
    starts = offsets[:-1][offsets[:-1] < count].tolist()
    yield from (slice(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True))


def check_offsets(c: Infer, index: int, tokens: object) -> None:
    """ModelError unless input `index` is int64[tokens + 1]."""
    type_ = c.tensor(index)
    if type_.dtype is not DType.INT64 or type_.shape is None or len(type_.shape) != 1 or type_.shape[0] - 1 != tokens:
        c.fail(f"offsets are {type_}, expected int64[{tokens} + 1]")


@register
class SegmentSoftmax(OpDef):
    """Block-diagonal softmax over the last axis of scores [..., n, n].

    Each query (second to last axis) meets only keys of its own sequence; all other results are zero. `guarded`: NaN
    results become zero, as where every key is masked by -inf.
    """

    domain = "lathe"
    inputs = "scores, offsets"
    outputs = "weights"
    attrs = {"guarded": 0}
    no_gradient = _MADE_BY_PASSES

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape = check_kind(c, 0, FLOAT), c.shape(0)
        if shape is None or len(shape) < 2 or shape[-1] != shape[-2]:
            c.fail(f"scores are {c.tensor(0)}, expected a square for each pair of tokens")
        check_offsets(c, 1, shape[-1])
        return [TensorType(dtype, shape)]

    def reference(self, c: Call, scores: Array, offsets: Array) -> Array:
        weights = np.zeros_like(scores)
        for at in segments(offsets):
            weights[..., at, at] = _shares(as_computed(scores[..., at, at]), c.attr("guarded"))
        return weights


def _shares(scores: Array, guarded: bool) -> Array:
    """Softmax over the last axis; with `guarded`, NaN results become zero."""
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        shares = powers / powers.sum(-1, keepdims=True)
    return np.where(np.isnan(shares), 0, shares) if guarded else np.asarray(shares)


_OVER = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
}


@register
class SegmentReduce(OpDef):
    """One row per sequence: Y[s, ...] is the sum, mean, max, min, first or last (`mode`) of its tokens along `axis`.

    Y has n rows, and the other axes of x after them; rows after the last sequence are undefined.
    """

    domain = "lathe"
    inputs = "x, offsets"
    outputs = "y"
    attrs = {"axis": Required("int"), "mode": Required("str")}
    no_gradient = _MADE_BY_PASSES

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = c.tensor(0)
        axis = normalize_axis(c, c.attr("axis"), type_.rank)
        if c.attr("mode") not in _OVER:
            c.fail(f"attribute 'mode' is {c.attr('mode')!r}, expected one of {', '.join(_OVER)}")
        tokens, *rest = (type_.dims[axis], *type_.dims[:axis], *type_.dims[axis + 1 :])
        check_offsets(c, 1, tokens)
        return [TensorType(type_.dtype, (tokens, *rest))]

    def reference(self, c: Call, x: Array, offsets: Array) -> Array:
        tokens = np.moveaxis(x, c.attr("axis"), 0)
        result = np.zeros(tokens.shape, x.dtype)
        for row, at in enumerate(segments(offsets)):
            result[row] = _OVER[c.attr("mode")](as_computed(tokens[at]))
        return result


@register
class SegmentAttention(FusedAttention):
    """FusedAttention in which a query meets only the keys of its own sequence; the input `offsets` comes after V.

    Queries and keys are the same n tokens. Extras broadcast to scores [..., n, n], of which only the diagonal blocks
    are computed. `guarded`: see SegmentSoftmax.
    """

    inputs = "Q, K, V, offsets, *extras"
    attrs = {**FusedAttention.attrs, "guarded": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        types = self.attended(c, first_extra=4)
        queries = permuted_shape(c.tensor(0).dims, c.attr("perm_q"))[-2]
        if permuted_shape(c.tensor(1).dims, c.attr("perm_k"))[-1] != queries:
            c.fail("queries and keys are not the same tokens")
        check_offsets(c, 3, queries)
        return types

    def reference(self, c: Call, q: Array, k: Array, v: Array, offsets: Array, *extras: Array) -> Array:  # type: ignore[override]
        perms = (c.attr("perm_q"), c.attr("perm_k"), c.attr("perm_v"))
        left, right, values = (transposed_view(as_computed(x), perm) for x, perm in zip((q, k, v), perms, strict=True))
        scores = apply_epilogue(c, np.asarray(np.matmul(left, right)), extras)
        batch = np.broadcast_shapes(scores.shape[:-2], values.shape[:-2])
        found = np.zeros((*batch, scores.shape[-2], values.shape[-1]), np.result_type(scores, values))
        for at in segments(offsets):  # separately: a NaN of another sequence times 0 is NaN
            found[..., at, :] = np.matmul(_shares(scores[..., at, at], c.attr("guarded")), values[..., at, :])
        return transposed_view(found.astype(v.dtype, copy=False), c.attr("perm_y"))
