"""`TokenRunner`: runs tokens of many sequences together, over a cache of keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence: `tokens` int64 [k], at positions `position` to `position + k - 1`.

    `pages`: the numbers of the cache pages of the sequence, in order; page i holds positions i * page_size to
    (i + 1) * page_size - 1. They cover all positions up to the last token. `wanted`: how many of the last tokens
    need logits: 0 for a chunk inside a prompt, 1 for its end and for a single token, more for drafts and
    log-probabilities. `adapter`: the number of the sequence's adapter from 1 on, 0 for none.
    """

    tokens: NDArray[np.int64]
    position: int
    pages: Sequence[int]
    wanted: int = 1
    adapter: int = 0


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
