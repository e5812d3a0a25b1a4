"""TfIdfVectorizer: counts n-grams, which may skip tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.type_rules import Kind, check_kind

_TOKENS = Kind("int32, int64 or string", frozenset({DType.INT32, DType.INT64, DType.STRING}))

Gram: TypeAlias = tuple[Any, ...]


@register
class TfIdfVectorizer(OpDef):
    """The count of each n-gram of a pool in a row of tokens.

    X is [C] or [N,C]; the result is float32, with the largest of `ngram_indexes` plus 1 as its last extent. The pool
    lists all 1-grams, then all 2-grams, and so on. `ngram_counts` holds the start of each length in the pool,
    `ngram_indexes` the output index of each n-gram. `mode` IDF returns the weight of each n-gram that occurs, TFIDF its
    weight times its count. Weights are indexed by output position, as in ONNX Runtime, and are 1 by default.
    """

    inputs = "X"
    outputs = "Y"
    attrs = {
        "max_gram_length": Required("integer"),
        "max_skip_count": Required("integer"),
        "min_gram_length": Required("integer"),
        "mode": Required("text"),
        "ngram_counts": Required("integers"),
        "ngram_indexes": Required("integers"),
        "pool_int64s": (),
        "pool_strings": (),
        "weights": (),
    }
    zero_gradient = "counts do not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _TOKENS)
        self._check(c)
        shape = c.shape(0)
        if shape is None:
            return [TensorType(DType.FLOAT32, None)]
        if len(shape) not in (1, 2):
            c.fail(f"X is {c.tensor(0)}, expected [C] or [N,C]")
        return [TensorType(DType.FLOAT32, (*shape[:-1], max(c.attr("ngram_indexes")) + 1))]

    def _check(self, c: Infer) -> None:
        indexes, weights = c.attr("ngram_indexes"), c.attr("weights")
        if c.attr("mode") not in ("TF", "IDF", "TFIDF"):
            c.fail(f"mode is {c.attr('mode')!r}, expected TF, IDF or TFIDF")
        if not indexes or min(indexes) < 0:
            c.fail("ngram_indexes is empty or has a negative place, expected one place per n-gram")
        if bool(c.attr("pool_int64s")) == bool(c.attr("pool_strings")):
            c.fail("expected either pool_int64s or pool_strings")
        if weights and len(weights) <= max(indexes):
            c.fail(f"has {len(weights)} weights, expected {max(indexes) + 1}")
        lengths, starts, pool = _lengths(c), c.attr("ngram_counts"), c.attr("pool_int64s") or c.attr("pool_strings")
        if lengths.start < 1 or not lengths or c.attr("max_skip_count") < 0:
            asked = f"n-grams of {lengths.start} to {lengths.stop - 1} tokens, {c.attr('max_skip_count')} skipped"
            c.fail(f"counts {asked}; expected 1 or more tokens, and 0 or more skipped")
        if not starts or list(starts) != sorted(starts) or not all(0 <= start <= len(pool) for start in starts):
            c.fail(f"ngram_counts is {list(starts)}, expected growing positions up to {len(pool)}")
        if (last := max(_pool(c).values(), default=-1)) >= len(indexes):
            c.fail(f"has {len(indexes)} ngram_indexes, expected one for each n-gram of the pool, at least {last + 1}")

    def reference(self, c: Call, x: Array) -> Array:
        places, size = _pool(c), max(c.attr("ngram_indexes")) + 1
        rows = [_counts(c, row.tolist(), places, size) for row in x.reshape(prod(x.shape[:-1]), x.shape[-1])]
        counts = np.array(rows, np.float32).reshape(*x.shape[:-1], size)
        found = counts if c.attr("mode") != "IDF" else np.minimum(counts, 1)
        weights = np.array(c.attr("weights")[:size] or [1], np.float32)
        return found if c.attr("mode") == "TF" else (found * weights).astype(np.float32)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if axes[0] is None or (shape is not None and len(shape) == 2 and axes[0] == 0):
            return [axes[0]]
        return MixesRows("TfIdfVectorizer counts along the row axis")


def _lengths(c: NodeView) -> range:
    return range(c.attr("min_gram_length"), c.attr("max_gram_length") + 1)


def _pool(c: NodeView) -> dict[Gram, int]:
    """The n-grams of the requested lengths, each with its number among the n-grams of all lengths in the pool."""
    pool, starts = c.attr("pool_int64s") or c.attr("pool_strings"), [*c.attr("ngram_counts")]
    places: dict[Gram, int] = {}
    number = 0
    for length, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        for at in range(start, end - length + 1, length):
            if length in _lengths(c):
                places[tuple(pool[at : at + length])] = number
            number += 1
    return places


def _counts(c: NodeView, tokens: Sequence[Any], places: Mapping[Gram, int], size: int) -> list[int]:
    counts = [0] * size
    for gram, times in Counter(_grams(c, tokens)).items():
        if gram in places:
            counts[c.attr("ngram_indexes")[places[gram]]] += times
    return counts


def _grams(c: NodeView, tokens: Sequence[Any]) -> Iterator[Gram]:
    """Yield the n-grams of a row: tokens at equal distances, with 0 to `max_skip_count` tokens skipped between them."""
    for length in _lengths(c)[: len(tokens)]:
        for step in range(1, min(c.attr("max_skip_count") if length > 1 else 0, len(tokens)) + 2):
            for start in range(len(tokens) - step * (length - 1)):
                yield tuple(tokens[start : start + step * (length - 1) + 1 : step])
