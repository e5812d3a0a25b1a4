"""Causal self-attention of a decoder.

`attend`, and `attend_cached` over a cache, are the only code of a decoder in which a token reads other tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lathe.core.ir.types import DType
from lathe.core.language.settings import DecoderSettings
from lathe.core.nn.linear import Linear
from lathe.core.nn.module import Module
from lathe.core.nn.norm import RMSNorm
from lathe.core.nn.tensor import Tensor, cat, tensor, where

_LEFT_OUT = -math.inf  # the score of a key that a query does not see; each query sees at least its own key


@dataclass(frozen=True)
class Places:
    """The places of tokens in their sequence: `positions`, int64 [length], counts from 0.

    `rotation` has cosines and sines [length, head_size / 2] of the angles by which positions rotate queries and keys;
    None for a model without rotary embedding.
    """

    positions: Tensor
    rotation: tuple[Tensor, Tensor] | None

    def rotated(self, x: Tensor) -> Tensor:
        """Queries or keys [batch, heads, length, size], rotated by the angles of their positions."""
        return _rotated(x, self.rotation)


@dataclass(frozen=True)
class CachePlaces:
    """The places of n tokens of many sequences, in their sequences and in the cache: see the operator CachedAttention.

    `positions`, `sequences` and `slots` are int64 [n], `tables` is int64 [n, pages of the longest sequence].
    `rotation` has cosines and sines [n, 1, head_size / 2], or is None.
    """

    positions: Tensor
    sequences: Tensor
    slots: Tensor
    tables: Tensor
    rotation: tuple[Tensor, Tensor] | None

    def rotated(self, x: Tensor) -> Tensor:
        """Queries or keys [n, heads, size], rotated by the angles of their positions."""
        return _rotated(x, self.rotation)


def places_of(length: Tensor, settings: DecoderSettings) -> Places:
    """The places of the tokens of a sequence of `length` (int64 of rank 0) tokens."""
    zero, one = tensor(0), tensor(1)
    positions = zero.op("Range", length, one)
    return Places(positions, _rotation(positions.unsqueeze(1), settings))


def cache_places(
    positions: Tensor, sequences: Tensor, slots: Tensor, tables: Tensor, settings: DecoderSettings
) -> CachePlaces:
    """The places of tokens at these positions of their sequences."""
    rotation = _rotation(positions.unsqueeze(1).unsqueeze(2), settings)
    return CachePlaces(positions, sequences, slots, tables, rotation)


def _rotation(positions: Tensor, settings: DecoderSettings) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of the angles for positions [..., 1]: [..., head_size / 2]; None without rotary embedding."""
    if settings.rotary is None:
        return None
    angles = positions.to(DType.FLOAT32) * settings.rotary.frequencies(settings.head_size)
    return angles.op("Cos"), angles.op("Sin")


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    if rotation is None:
        return x
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, places: Places, window: int | None) -> Tensor:
    """softmax(Q K^T / sqrt(size)) V over the keys up to a query's own position, the last `window` of them.

    Queries [batch, heads, length, size], keys and values [batch, kv_heads, length, size] -> the shape of the queries.
    Consecutive heads of queries share a head of keys (Ainslie et al., 2023: grouped-query attention).
    """
    shared = query.extent(1) // key.extent(1)
    key, value = _repeated(key, shared), _repeated(value, shared)
    scores = query @ key.transpose(2, 3) * (1 / math.sqrt(query.extent(3)))
    own, other = places.positions.unsqueeze(1), places.positions.unsqueeze(0)
    seen = other <= own
    if window is not None:
        seen = seen & (own - other < window)
    return where(seen, scores, _LEFT_OUT).softmax(-1) @ value


@dataclass(frozen=True)
class LayerCache:
    """The cached keys [pages, kv_heads, size, page] and values [pages, kv_heads, page, size] of a layer.

    A cache of int8 has the scales of both, [pages, kv_heads, page, 1], of each token and head.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        found = {"keys": self.keys, "values": self.values}
        if self.key_scales is not None and self.value_scales is not None:
            found |= {"key_scales": self.key_scales, "value_scales": self.value_scales}
        return found

    def written(self, key: Tensor, value: Tensor, slots: Tensor) -> LayerCache:
        """The cache with keys and values [n, kv_heads, size] of tokens at these slots."""
        if self.key_scales is None or self.value_scales is None:
            keys = self.keys.op("CacheWrite", key, slots, transposed=1)
            return LayerCache(keys, self.values.op("CacheWrite", value, slots))
        (key, key_scale), (value, value_scale) = _codes(key), _codes(value)
        return LayerCache(
            self.keys.op("CacheWrite", key, slots, transposed=1),
            self.values.op("CacheWrite", value, slots),
            self.key_scales.op("CacheWrite", key_scale, slots),
            self.value_scales.op("CacheWrite", value_scale, slots),
        )


_LEAST_SCALE = 1e-30  # so that rows of zeros are divided by a number


def _codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., size] as int8 of -127 to 127, and their scales [..., 1]: the largest magnitude is 127."""
    scales = rows.abs().amax(-1, keepdim=True) * (1 / 127)
    return (rows / scales.clamp(_LEAST_SCALE)).op("Round").to(DType.INT8), scales


def attend_cached(
    query: Tensor, key: Tensor, value: Tensor, places: CachePlaces, window: int | None, cache: LayerCache
) -> tuple[Tensor, LayerCache]:
    """`attend` for n tokens over the cache, to which their own keys and values are added first.

    Queries [n, heads, size], keys and values [n, kv_heads, size] -> the shape of the queries, and the next cache.
    """
    cache = cache.written(key, value, places.slots)
    scale = 1 / math.sqrt(query.extent(2))
    found = query.op(
        "CachedAttention", cache.keys, cache.values, places.positions, places.sequences, places.tables,
        cache.key_scales, cache.value_scales, scale=scale, window=window or 0,
    )  # fmt: skip
    return found, cache


def _repeated(x: Tensor, count: int) -> Tensor:
    """Keys or values [batch, heads, length, size] with each head repeated: [batch, heads * count, length, size]."""
    if count == 1:
        return x
    batch, heads, length, size = x.shape
    return x.unsqueeze(2).expand(batch, heads, count, length, size).reshape(batch, heads * count, length, size)


class SelfAttention(Module):
    """Projections to queries, keys and values, attention, and the output projection: [batch, length, width] -> same.

    `number` is that of the layer.
    """

    def __init__(self, settings: DecoderSettings, number: int) -> None:
        self.heads, self.kv_heads, self.size = settings.heads, settings.kv_heads, settings.head_size
        self.window, self.rotated = settings.windows[number], number not in settings.unrotated
        width, bias = settings.width, settings.query_bias
        self.q_proj = Linear(width, self.heads * self.size, bias)
        self.k_proj, self.v_proj = (Linear(width, self.kv_heads * self.size, bias) for _ in range(2))
        self.o_proj = Linear(self.heads * self.size, width, settings.output_bias)
        self.q_norm = RMSNorm(self.size, settings.epsilon) if settings.query_norm else None
        self.k_norm = RMSNorm(self.size, settings.epsilon) if settings.query_norm else None

    def forward(self, x: Tensor, places: Places) -> Tensor:
        query, key, value = (each.transpose(1, 2) for each in self._projected(x))
        if self.rotated:
            query, key = places.rotated(query), places.rotated(key)
        found = attend(query, key, value, places, self.window).transpose(1, 2)
        return self._joined(found, x)

    def cached(self, x: Tensor, places: CachePlaces, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """The same for tokens of many sequences, [n, width] -> same, over a cache, which the tokens join."""
        query, key, value = self._projected(x)
        if self.rotated:
            query, key = places.rotated(query), places.rotated(key)
        found, cache = attend_cached(query, key, value, places, self.window, cache)
        return self._joined(found, x), cache

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, size] of [..., width], before rotation."""
        query, key = self._split(self.q_proj(x), self.heads), self._split(self.k_proj(x), self.kv_heads)
        query = query if self.q_norm is None else self.q_norm(query)
        key = key if self.k_norm is None else self.k_norm(key)
        return query, key, self._split(self.v_proj(x), self.kv_heads)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[..., heads * size] -> [..., heads, size]."""
        return x.reshape(*x.shape[:-1], heads, self.size)

    def _joined(self, found: Tensor, x: Tensor) -> Tensor:
        """The output projection of [..., heads, size], for the shape of `x`."""
        return self.o_proj(found.reshape(*x.shape[:-1], self.heads * self.size))
