"""`TokenRunner`: runs tokens of many sequences together, over a cache of keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError
from lathe.core.language.source import Source


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence: `tokens` int64 [k], at positions `position` to `position + k - 1`.

    `pages`: the numbers of the cache pages of the sequence, in order; page i holds positions i * page_size to
    (i + 1) * page_size - 1. They cover all positions up to the last token. `wanted`: how many of the last tokens
    need logits: 0 for a chunk inside a prompt, 1 for its end and for a single token, more for drafts and
    log-probabilities. `adapter`: the number of the sequence's adapter from 1 on, 0 for none. `source`: what an
    encoder-decoder reads; None for decoders.
    """

    tokens: NDArray[np.int64]
    position: int
    pages: Sequence[int]
    wanted: int = 1
    adapter: int = 0
    source: Source | None = None


class TokenRunner(Protocol):
    """Runs tokens of many sequences together; keeps the keys and values of earlier tokens in pages of a cache."""

    page_size: int  # tokens per page
    page_count: int  # pages of the cache; page numbers are 0 to page_count - 1
    vocabulary: int
    context: int  # the most positions of a sequence
    capacity: int  # the most tokens of a run
    adapter_count: int

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Logits [sum of wanted, vocabulary] of the wanted tokens, in the order of the chunks. Fills the pages.

        Chunks of one run belong to different sequences; one run at a time. A page may be shared by sequences if it
        holds the same tokens at the same positions for all (prefix cache): then no chunk writes to it.
        """
        ...

    def close(self) -> None: ...


def checked_pages(runner: TokenRunner, number: int, chunk: Chunk) -> NDArray[np.int64]:
    """The pages of a chunk up to its last token: int64 [pages].

    FeedError, which names the chunk's `number` in its run, for a chunk without tokens or beyond the context, for more
    wanted tokens than it has, and for pages that do not cover it or do not exist.
    """
    length = len(chunk.tokens)
    end = chunk.position + length
    if not length or chunk.position < 0 or end > runner.context:
        raise FeedError(
            f"chunk {number}: expected 1 or more tokens at positions of 0 to {runner.context - 1}, "
            f"got {length} at {chunk.position}"
        )
    if not 0 <= chunk.wanted <= length:
        raise FeedError(f"chunk {number}: wanted: expected 0 to {length}, got {chunk.wanted}")
    if not 0 <= chunk.adapter <= runner.adapter_count:
        raise FeedError(f"chunk {number}: adapter: expected 0 to {runner.adapter_count}, got {chunk.adapter}")
    needed = -(-end // runner.page_size)
    pages = np.asarray(chunk.pages[:needed], np.int64)
    if len(pages) < needed or pages.min() < 0 or pages.max() >= runner.page_count:
        raise FeedError(
            f"chunk {number}: pages: expected {needed} numbers of 0 to {runner.page_count - 1}, got {chunk.pages}"
        )
    return pages
