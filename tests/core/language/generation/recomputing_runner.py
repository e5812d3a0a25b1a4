"""`RecomputingRunner`: a runner of tokens without a cache of keys and values, which computes each text again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError
from lathe.core.language.language_model import LanguageModel
from lathe.core.language.token_runner import Chunk

Compute = Callable[[NDArray[np.int64]], NDArray[np.float32]]


class RecomputingRunner:
    """A `TokenRunner` whose pages hold the tokens themselves.

    A run computes the logits of all positions up to the last token of each chunk: `compute` returns them,
    [1, length, vocabulary], for token ids [1, length]. So a run costs as much as the whole text, and its results do
    not depend on the engine's pages if those hold the right tokens. `close` calls `on_close`.
    """

    adapter_count = 0

    def __init__(
        self,
        compute: Compute,
        vocabulary: int,
        context: int,
        *,
        pages: int,
        page_size: int = 32,
        capacity: int = 512,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.vocabulary, self.context, self.capacity = vocabulary, context, capacity
        self.page_count, self.page_size = pages, page_size
        self._compute = compute
        self._on_close = on_close
        self._tokens = np.full((pages, page_size), -1, np.int64)

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Logits [sum of wanted, vocabulary]. FeedError for more tokens than `capacity`, or for unfilled pages."""
        total = sum(len(chunk.tokens) for chunk in chunks)
        if total > self.capacity:
            raise FeedError(f"tokens of a run: expected at most {self.capacity}, got {total}")
        for chunk in chunks:
            positions = chunk.position + np.arange(len(chunk.tokens))
            pages = np.asarray(chunk.pages, np.int64)[positions // self.page_size]
            self._tokens[pages, positions % self.page_size] = chunk.tokens
        rows = [self._logits(chunk) for chunk in chunks if chunk.wanted]
        return np.concatenate(rows) if rows else np.empty((0, self.vocabulary), np.float32)

    def close(self) -> None:
        self._on_close()

    def _logits(self, chunk: Chunk) -> NDArray[np.float32]:
        length = chunk.position + len(chunk.tokens)
        text = self._tokens[np.asarray(chunk.pages, np.int64)].reshape(-1)[:length]
        if (text < 0).any():
            raise FeedError(f"pages: expected tokens at all {length} positions, some were never run")
        return np.asarray(self._compute(text[None])[0, -chunk.wanted :], np.float32)


def recomputing_runner(
    model: LanguageModel, *, pages: int, page_size: int = 32, capacity: int = 512, threads: int | None = None
) -> RecomputingRunner:
    """The runner over the compiled graph of a model."""
    from lathe.core.compiler.compile import compile

    session = compile(model.graph, threads=threads, tune="off", new_shapes="wait")
    return RecomputingRunner(
        lambda ids: session.run({"input_ids": ids})["logits"],
        model.settings.vocabulary,
        model.settings.context,
        pages=pages,
        page_size=page_size,
        capacity=capacity,
        on_close=session.close,
    )
