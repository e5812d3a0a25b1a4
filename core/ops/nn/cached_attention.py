"""Attention of a decoder over a cache of keys and values in pages, which tokens of many sequences share.

A page holds `page` consecutive positions of one sequence. The pages of a sequence lie anywhere in the cache; a table
lists their numbers in order (Kwon et al., 2023: PagedAttention). Keys lie in a page as [size, page], so that a vector
register holds one element of many keys, and values as [page, size]. A cache of int8 has a scale for each token and
head: the keys and values are the codes times their scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, ValueType
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.type_rules import as_computed

CACHE_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT8})
_NO_TRAINING = "the cache is for inference; training runs whole sequences"


@register
class CacheWrite(OpDef):
    """The cache after tokens have stored their keys or values: `rows` [n, heads, size] into `pages`.

    `pages` are [count, heads, page, size], or with `transposed` [count, heads, size, page], in float32, float16,
    bfloat16 or int8. Rows are float32; those for pages of int8 are int8. Token t goes to place `slots[t]`, int64 [n]:
    its page times `page`, plus its place in the page. Slots are different. The result has the type of `pages`; as the
    next value of a state it is written in place. FeedError for a slot outside the cache.
    """

    domain = "lathe"
    inputs = "pages, rows, slots"
    outputs = "written"
    attrs = {"transposed": 0}
    reads_narrow = True
    no_gradient = _NO_TRAINING

    def infer(self, c: Infer) -> Sequence[ValueType]:
        _, heads, page, size = _cache_dims(c, 0)
        if c.attr("transposed"):
            page, size = size, page
        rows = DType.INT8 if c.dtype(0) is DType.INT8 else DType.FLOAT32
        tokens = _expect(c, 1, rows, (None, heads, size))[0]
        _expect(c, 2, DType.INT64, (tokens,))
        return [c.tensor(0)]

    def reference(self, c: Call, pages: Array, rows: Array, slots: Array) -> Array:
        written = np.array(pages)
        by_place = written.swapaxes(2, 3) if c.attr("transposed") else written  # [count, heads, page, size]
        count, _, page, _ = by_place.shape
        _check_numbers(c, "slots", slots, count * page)
        by_place[slots // page, :, slots % page] = rows.astype(pages.dtype)
        return written

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if any(axis is not None for axis in axes):
            return MixesRows("CacheWrite stores all rows in one cache")
        return [None]


@register
class CachedAttention(OpDef):
    """softmax(scale * Q K^T) V of n tokens over the cached keys of their sequences, up to the position of each token.

    Q float32 [n, heads, size]; keys [count, kv_heads, size, page] and values [count, kv_heads, page, size] in float32,
    float16, bfloat16, or int8 with scales float32 [count, kv_heads, page, 1] for both; consecutive heads of queries
    share a head of keys. Token t has the position `positions[t]` in its sequence, and row `sequences[t]` of `tables`,
    int64 [n, most], lists the pages of that sequence. Tokens of one sequence lie one after the other in ascending
    positions. With a `window` above 0, a token sees only the last `window` positions, its own included. The result is
    float32 [n, heads, size]. FeedError for a position, sequence or page out of range.
    """

    domain = "lathe"
    inputs = "Q, keys, values, positions, sequences, tables, key_scales?, value_scales?"
    outputs = "Y"
    attrs = {"scale": Required("float"), "window": 0}
    reads_narrow = True
    no_gradient = _NO_TRAINING

    def infer(self, c: Infer) -> Sequence[ValueType]:
        count, kv_heads, size, page = _cache_dims(c, 1)
        tokens, heads, _ = _expect(c, 0, DType.FLOAT32, (None, None, size))
        _expect(c, 2, c.dtype(1), (count, kv_heads, page, size))
        _expect(c, 3, DType.INT64, (tokens,))
        _expect(c, 4, DType.INT64, (tokens,))
        _expect(c, 5, DType.INT64, (tokens, None))
        for index in (6, 7):
            if c.has_input(index) != (c.dtype(1) is DType.INT8):
                c.fail(f"{c.op.input_name(index)}: expected scales if keys are int8, and none otherwise")
            if c.has_input(index):
                _expect(c, index, DType.FLOAT32, (count, kv_heads, page, 1))
        if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % max(kv_heads, 1):
            c.fail(f"has {heads} heads of queries, expected a multiple of the {kv_heads} heads of keys")
        if c.attr("window") < 0:
            c.fail(f"attribute 'window' is {c.attr('window')}, expected 0 for none, or a number of positions")
        return [c.tensor(0)]

    def reference(
        self,
        c: Call,
        q: Array,
        keys: Array,
        values: Array,
        positions: Array,
        sequences: Array,
        tables: Array,
        key_scales: Array | None = None,
        value_scales: Array | None = None,
    ) -> Array:
        count, kv_heads, size, page = keys.shape
        _check_numbers(c, "sequences", sequences, len(tables))
        _check_numbers(c, "positions", positions, tables.shape[1] * page)
        grouped = q.reshape(len(q), kv_heads, -1, size)
        found = np.zeros_like(grouped)
        for token, (position, sequence) in enumerate(zip(positions.tolist(), sequences.tolist(), strict=True)):
            begin = max(position + 1 - c.attr("window"), 0) if c.attr("window") else 0
            places = np.arange(begin, position + 1)
            numbers = tables[sequence, places // page]
            _check_numbers(c, "tables", numbers, count)
            key = _scaled(keys[numbers, :, :, places % page], key_scales, numbers, places % page)
            value = _scaled(values[numbers, :, places % page], value_scales, numbers, places % page)
            scores = np.einsum("hgd,phd->hgp", grouped[token], key) * np.float32(c.attr("scale"))
            powers = np.exp(scores - scores.max(-1, keepdims=True))
            found[token] = np.einsum("hgp,phd->hgd", powers / powers.sum(-1, keepdims=True), value)
        return found.reshape(q.shape)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """Rows stay apart only if the cache and the tables are the same for all of them."""
        queries, keys, values, positions, sequences, *shared = axes
        own = queries == positions == sequences and queries in (0, None)
        if own and all(axis is None for axis in (keys, values, *shared)):
            return [queries]
        return MixesRows("CachedAttention reads a cache and tables that hold tokens of all rows")


def _scaled(found: Array, scales: Array | None, numbers: Array, places: Array) -> Array:
    """Keys or values [positions, kv_heads, size] in float32: codes times the scales at these places of pages."""
    return as_computed(found) if scales is None else found.astype(np.float32) * scales[numbers, :, places]


def _cache_dims(c: Infer, index: int) -> tuple[Dim, Dim, Dim, Dim]:
    """The extents of the cache in input `index`. ModelError unless it has rank 4 and one of `CACHE_DTYPES`."""
    type_ = c.tensor(index)
    if type_.dtype not in CACHE_DTYPES or type_.shape is None or len(type_.shape) != 4:
        c.fail(f"pages are {type_}, expected a tensor of rank 4 of float32, float16, bfloat16 or int8")
    count, heads, one, other = type_.shape
    return count, heads, one, other


def _expect(c: Infer, index: int, dtype: DType, shape: tuple[Dim | None, ...]) -> tuple[Dim, ...]:
    """The extents of input `index`. ModelError unless it has this type, in which None stands for any extent."""
    type_ = c.tensor(index)
    given = type_.shape
    fits = given is not None and len(given) == len(shape)
    if type_.dtype is not dtype or given is None or not fits:
        _refuse(c, index, dtype, shape)
    if not all(want is None or c.agree(have, want) for have, want in zip(given, shape, strict=True)):
        _refuse(c, index, dtype, shape)
    return given


def _refuse(c: Infer, index: int, dtype: DType, shape: tuple[Dim | None, ...]) -> NoReturn:
    wanted = ",".join("?" if extent is None else str(extent) for extent in shape)
    c.fail(f"{c.op.input_name(index)}: is {c.tensor(index)}, expected {dtype}[{wanted}]")


def _check_numbers(c: Call, name: str, numbers: Array, end: int) -> None:
    """FeedError unless all numbers are from 0 up to, but without, `end`."""
    wrong = numbers[(numbers < 0) | (numbers >= end)]
    if wrong.size:
        c.fail(f"{name}: {wrong.flat[0]} is out of range, expected 0 to {end - 1}")
