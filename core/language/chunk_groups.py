"""Runs the chunks of equal lengths and positions together, for graphs that have no ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError, UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.language.token_runner import Chunk, TokenRunner, checked_pages

Slots = NDArray[np.int64]
# Logits [chunks, tokens, vocabulary] of chunks of equal lengths and positions, and the slots int64 [chunks, end] of all
# tokens of their sequences up to their end.
RunGroup = Callable[[Sequence[Chunk], Slots], NDArray[np.float32]]


class PagedArrays:
    """`count` arrays over a cache of pages, each with rows of [heads, size] for the tokens of all pages."""

    def __init__(self, count: int, heads: int, size: int, tokens: int, dtype: np.dtype[np.generic]) -> None:
        # Zeros from the operating system: pages of memory that no token has reached cost nothing.
        self._rows: Array = np.zeros((count, heads, tokens, size), dtype)

    def read(self, slots: Slots) -> list[Array]:
        """The rows in slots [batch, tokens]: of each array [batch, heads, tokens, size]."""
        return [np.ascontiguousarray(rows[:, slots].swapaxes(0, 1)) for rows in self._rows]

    def write(self, slots: Slots, arrays: Sequence[Array]) -> None:
        """Store arrays [batch, heads, tokens, size], one for each, in slots [batch, tokens]."""
        for rows, array in zip(self._rows, arrays, strict=True):
            rows[:, slots] = array.swapaxes(0, 1)


def run_in_groups(
    runner: TokenRunner, chunks: Sequence[Chunk], kind: Callable[[Chunk], Hashable], run_group: RunGroup
) -> NDArray[np.float32]:
    """Logits [sum of wanted, vocabulary] of the wanted tokens, in the order of the chunks.

    Chunks share a call of `run_group` if `kind`, their positions and their lengths are equal. FeedError for a chunk
    that `checked_pages` refuses, for tokens outside the vocabulary, and for more tokens than `runner.capacity`.
    UnsupportedError for more wanted tokens than there are logits of.
    """
    if (count := sum(len(chunk.tokens) for chunk in chunks)) > runner.capacity:
        raise FeedError(f"chunks: expected at most {runner.capacity} tokens, got {count}")
    slots = [_slots(runner, number, chunk) for number, chunk in enumerate(chunks)]
    groups: dict[Hashable, list[int]] = {}
    for number, chunk in enumerate(chunks):
        groups.setdefault((chunk.position, len(chunk.tokens), kind(chunk)), []).append(number)
    nothing = np.empty((0, runner.vocabulary), np.float32)
    rows = [nothing] * len(chunks)
    for numbers in groups.values():
        logits = run_group([chunks[i] for i in numbers], np.stack([slots[i] for i in numbers]))
        for number, own in zip(numbers, logits, strict=True):
            if (wanted := chunks[number].wanted) > len(own):
                raise UnsupportedError(f"the model has logits of its last {len(own)} tokens, wanted {wanted}")
            rows[number] = own[len(own) - wanted :]
    return np.concatenate([nothing, *rows])


def _slots(runner: TokenRunner, number: int, chunk: Chunk) -> Slots:
    """The places in the cache of all tokens of a sequence up to the end of a chunk: int64 [tokens]."""
    pages = checked_pages(runner, number, chunk)
    if chunk.tokens.min() < 0 or chunk.tokens.max() >= runner.vocabulary:
        raise FeedError(f"chunk {number}: tokens: expected numbers of 0 to {runner.vocabulary - 1}")
    places = np.arange(chunk.position + len(chunk.tokens))
    found: Slots = pages[places // runner.page_size] * runner.page_size + places % runner.page_size
    return found
