"""Operators on packed sequences: the tokens of several sequences lie one after the other along an axis of extent n.

`offsets`, int64[n + 1], says where each sequence begins; behind the last one it is n throughout, so that the number of
sequences, at most n as none is empty, needs no input of its own. Only `passes/pack.py` makes these operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from core.ir.graph import Array
from core.ir.types import DType, TensorType, ValueType
from core.ops.common import FLOAT, check_kind, normalize_axis, wide
from core.ops.fused import FusedAttention, apply_epilogue, permuted, transposed
from core.ops.registry import Call, Infer, OpDef, Required, register

_MADE_BY_PASSES = "passes make it, after differentiation"


def segments(offsets: Array) -> Iterator[slice]:
    """The tokens of each sequence."""
    count = int(offsets[-1])
    starts = offsets[:-1][offsets[:-1] < count].tolist()
    yield from (slice(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True))


def check_offsets(c: Infer, index: int, tokens: object) -> None:
    """ModelError unless an input is int64[tokens + 1]."""
    type_ = c.tensor(index)
    if type_.dtype is not DType.INT64 or type_.shape is None or len(type_.shape) != 1 or type_.shape[0] - 1 != tokens:
        c.fail(f"offsets are {type_}, expected int64[{tokens} + 1]")


@register
class SegmentSoftmax(OpDef):
    """Softmax over the last axis of scores [..., n, n], within the blocks where the query (second to last axis) and the
    key are of one sequence; zero elsewhere, whatever was there.

    `guarded`: weights that are no numbers, as where every key is masked by -inf, are zero as well.
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
            weights[..., at, at] = _shares(wide(scores[..., at, at]), c.attr("guarded"))
        return weights


def _shares(scores: Array, guarded: bool) -> Array:
    """Softmax over the last axis."""
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
    """One row per sequence from its tokens along `axis`: Y[s, ...] is their sum, mean, max or min, or the first or the
    last of them, as `mode` says. There is room for n rows, one per token; those beyond the sequences mean nothing."""

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
            result[row] = _OVER[c.attr("mode")](wide(tokens[at]))
        return result


@register
class SegmentAttention(FusedAttention):
    """FusedAttention in which a query only meets the keys of its own sequence: `offsets` come behind K and V. Queries
    and keys are the same n tokens, and extras broadcast to scores [..., n, n] of which only the blocks exist.
    `guarded` as SegmentSoftmax has it."""

    inputs = "Q, K, V, offsets, *extras"
    attrs = {**FusedAttention.attrs, "guarded": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        types = self.attended(c, first_extra=4)
        queries = permuted(c.tensor(0).dims, c.attr("perm_q"))[-2]
        if permuted(c.tensor(1).dims, c.attr("perm_k"))[-1] != queries:
            c.fail("queries and keys are not the same tokens")
        check_offsets(c, 3, queries)
        return types

    def reference(self, c: Call, q: Array, k: Array, v: Array, offsets: Array, *extras: Array) -> Array:  # type: ignore[override]
        perms = (c.attr("perm_q"), c.attr("perm_k"), c.attr("perm_v"))
        left, right, values = (transposed(wide(x), perm) for x, perm in zip((q, k, v), perms, strict=True))
        scores = apply_epilogue(c, np.asarray(np.matmul(left, right)), extras)
        batch = np.broadcast_shapes(scores.shape[:-2], values.shape[:-2])
        found = np.zeros((*batch, scores.shape[-2], values.shape[-1]), np.result_type(scores, values))
        for at in segments(offsets):  # one by one: a NaN of another sequence times 0 would be a NaN
            found[..., at, :] = np.matmul(_shares(scores[..., at, at], c.attr("guarded")), values[..., at, :])
        return transposed(found.astype(v.dtype, copy=False), c.attr("perm_y"))
