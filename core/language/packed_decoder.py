"""`PackedDecoder`: runs compiled code whose rows are tokens of many sequences, over a cache that is its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.options import Options
from lathe.core.compiler.pipeline import compile_host_executable
from lathe.core.errors import FeedError
from lathe.core.ir.graph import Array, Graph
from lathe.core.language.token_runner import Chunk, checked_pages
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.host.executable import Executable

_BATCHING = BatchInfo(False, "tokens read the cache, which other tokens write", "n")


class PackedDecoder(ABC):
    """Implements `lathe.core.language.token_runner.TokenRunner` with two executables.

    The step takes an input for the tokens, then `positions`, `sequences`, `slots` and `tables` of the operators
    CacheWrite and CachedAttention, with adapters also the number of each token's. It gives hidden states, and the head
    makes logits of them. Not thread-safe: one run at a time.
    """

    def __init__(
        self, step: Executable, head: Executable, *, vocabulary: int, context: int, pages: int, page_size: int,
        capacity: int, adapters: int = 0,
    ) -> None:  # fmt: skip
        self._step, self._head = step, head
        self.vocabulary, self.context, self.adapter_count = vocabulary, context, adapters
        self.page_size, self.page_count, self.capacity = page_size, pages, capacity
        self._tables = np.zeros((capacity, -(-context // page_size)), np.int64)

    @abstractmethod
    def _inputs(self, tokens: NDArray[np.int64]) -> Array:
        """The first input of the step for tokens [n] of the vocabulary."""

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Logits [sum of wanted, vocabulary] of the wanted tokens, in the order of the chunks. Fills the pages.

        FeedError for a chunk that `checked_pages` refuses, and for more tokens than `capacity`.
        """
        count = sum(len(chunk.tokens) for chunk in chunks)
        if count > self.capacity:
            raise FeedError(f"chunks: expected at most {self.capacity} tokens, got {count}")
        tokens, positions, sequences, slots, adapters = (np.empty(count, np.int64) for _ in range(5))
        wanted: list[NDArray[np.int64]] = []
        start = 0
        for number, chunk in enumerate(chunks):
            stop = start + len(chunk.tokens)
            listed = checked_pages(self, number, chunk)
            self._tables[number, : len(listed)] = listed
            places = np.arange(chunk.position, chunk.position + stop - start)
            tokens[start:stop], positions[start:stop], sequences[start:stop] = chunk.tokens, places, number
            adapters[start:stop] = chunk.adapter
            pages = self._tables[number, places // self.page_size]
            slots[start:stop] = pages * self.page_size + places % self.page_size
            wanted.append(np.arange(stop - chunk.wanted, stop))
            start = stop
        if not count:
            return np.empty((0, self.vocabulary), np.float32)
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise FeedError(f"tokens: expected 0 to {self.vocabulary - 1}, got {tokens.min()} to {tokens.max()}")
        feeds = [self._inputs(tokens), positions, sequences, slots, self._tables[:count]]
        (hidden,) = self._step.run(count, [*feeds, adapters] if self.adapter_count else feeds)
        rows = hidden[np.concatenate(wanted)]
        if not len(rows):
            return np.empty((0, self.vocabulary), np.float32)
        logits: NDArray[np.float32] = self._head.run(len(rows), [rows])[0]
        return logits.reshape(len(rows), -1)

    @property
    def executables(self) -> tuple[Executable, Executable]:
        """The code of a step, tokens to hidden states, and of the head, hidden states to logits."""
        return self._step, self._head

    def close(self) -> None:
        """Free code, weights and cache. Further runs raise SessionClosed."""
        self._step.close()
        self._head.close()


def compiled_step(graph: Graph, options: Options) -> Executable:
    """The code of a step, whose graph has the cache as states, with an empty cache."""
    made = compile_host_executable(graph, options, _BATCHING, ())
    for state in graph.states:
        # Zeros from the operating system: pages of memory that no token has reached cost nothing.
        made.adopt_state(state.value.name, np.zeros(state.value.tensor.evaluate({}), state.initial.dtype))
    return made


def compiled_head(graph: Graph, options: Options) -> Executable:
    """The code of a head, whose rows are independent."""
    return compile_host_executable(graph, options, BatchInfo(True, "", "n"), ())
