"""Attention of encoder-decoders: within an encoder, within a decoder, and from a decoder to an encoder's results."""

from __future__ import annotations

import math

from lathe.core.nn.tensor import Tensor, tensor, where

_LEFT_OUT = -math.inf  # the score of a key that a query does not see; each query sees at least its own key


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] -> [batch, heads, length, size]."""
    return x.reshape(*x.shape[:2], heads, x.extent(2) // heads).transpose(1, 2)


def joined_heads(x: Tensor) -> Tensor:
    """[batch, heads, length, size] -> [batch, length, heads * size]."""
    y = x.transpose(1, 2)
    return y.reshape(*y.shape[:2], y.extent(2) * y.extent(3))


def positions_of(x: Tensor) -> Tensor:
    """0, 1, ... along the second axis of [batch, length, ...]: int64 [length]."""
    zero, one = tensor(0), tensor(1)
    return zero.op("Range", x.op("Shape", start=1, end=2).squeeze(0), one)


def attend_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None, causal: Tensor | None = None
) -> Tensor:
    """softmax(scale * Q K^T + bias) V: [batch, heads, length, size] as the queries Q.

    Keys and values are [batch, heads, keys, size]; `bias` broadcasts to [batch, heads, length, keys]. With `causal`,
    the positions int64 [length] of queries and keys, a query sees the keys up to its own position.
    """
    scores = query @ key.transpose(2, 3)
    scores = scores if scale == 1 else scores * scale
    scores = scores if bias is None else scores + bias
    if causal is not None:
        scores = where(causal.unsqueeze(0) <= causal.unsqueeze(1), scores, _LEFT_OUT)
    return scores.softmax(-1) @ value
