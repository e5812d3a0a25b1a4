"""`TextSizes`: the sizes of a model that generates texts over a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextSizes:
    """Tokens of the vocabulary, the most positions of a text, and the layers, heads and elements of the cache."""

    vocabulary: int
    context: int
    layers: int
    kv_heads: int
    head_size: int
