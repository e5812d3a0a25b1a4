"""Attention of encoder-decoders: within an encoder, within a decoder, and from a decoder to an encoder's results."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lathe.core.nn.tensor import Tensor, cat, tensor, where

_LEFT_OUT = -math.inf  # the score of a key that a query does not see; each query sees at least its own key


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] -> [batch, heads, length, size]."""
    return x.reshape(*x.shape[:2], heads, x.extent(2) // heads).transpose(1, 2)


def joined_heads(x: Tensor) -> Tensor:
    """[batch, heads, length, size] -> [batch, length, heads * size]."""
    y = x.transpose(1, 2)
    return y.reshape(*y.shape[:2], y.extent(2) * y.extent(3))


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of a layer: [batch, heads, length, size]."""

    keys: Tensor
    values: Tensor

    def followed_by(self, later: KeysValues) -> KeysValues:
        """These, and then those of later tokens."""
        return KeysValues(cat([self.keys, later.keys], 2), cat([self.values, later.values], 2))


@dataclass(frozen=True)
class CausalPlaces:
    """The positions of queries, and of the keys that they may see: int64 [length] and [keys].

    A query sees the keys up to its own position.
    """

    queries: Tensor
    keys: Tensor


def positions_of(x: Tensor) -> Tensor:
    """0, 1, ... along the second axis of [batch, length, ...]: int64 [length]."""
    zero, one = tensor(0), tensor(1)
    return zero.op("Range", _extent(x, 1), one)


def places_after(x: Tensor, past: KeysValues) -> CausalPlaces:
    """The places of the tokens [batch, length, ...] that follow those of `past`."""
    zero, one = tensor(0), tensor(1)
    before = _extent(past.keys, 2)
    end = before + _extent(x, 1)
    return CausalPlaces(before.op("Range", end, one), zero.op("Range", end, one))


def _extent(x: Tensor, axis: int) -> Tensor:
    """The extent of an axis: int64 of rank 0."""
    return x.op("Shape", start=axis, end=axis + 1).squeeze(0)


def attend_heads(
    query: Tensor, source: KeysValues, scale: float, bias: Tensor | None = None, causal: CausalPlaces | None = None
) -> Tensor:
    """softmax(scale * Q K^T + bias) V: [batch, heads, length, size] as the queries Q.

    Keys and values are those of `source`; `bias` broadcasts to [batch, heads, length, keys].
    """
    scores = query @ source.keys.transpose(2, 3)
    scores = scores if scale == 1 else scores * scale
    scores = scores if bias is None else scores + bias
    if causal is not None:
        scores = where(causal.keys.unsqueeze(0) <= causal.queries.unsqueeze(1), scores, _LEFT_OUT)
    return scores.softmax(-1) @ source.values
