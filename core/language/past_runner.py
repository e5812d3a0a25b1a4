"""`PastRunner`: runs a decoder whose graph takes keys and values of earlier tokens as inputs, over a cache of pages."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.compile import compile
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Graph
from lathe.core.language.chunk_groups import PagedArrays, Slots, run_in_groups
from lathe.core.language.past_inputs import PastInputs, find_past_inputs
from lathe.core.language.token_runner import Chunk

_WARM_UP = ((1, 0), (2, 0), (1, 2), (3, 2))  # tokens and position of a first run


class PastRunner:
    """Runs tokens of many sequences: implements `lathe.core.language.token_runner.TokenRunner`.

    The graph is compiled once, for any lengths. Before a run, keys and values of earlier tokens are copied from the
    pages to the inputs of the graph; after it, those of the new tokens are copied back. Chunks of equal positions and
    lengths share a run of the graph, so no sequence is padded. Not thread-safe: one run at a time.
    """

    adapter_count = 0

    def __init__(
        self,
        graph: Graph,
        *,
        vocabulary: int,
        context: int,
        pages: int,
        page_size: int = 32,
        capacity: int = 512,
        threads: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Compile a graph that `find_past_inputs` knows, and claim the memory of the cache.

        ValueError for numbers below 1. UnsupportedError for a graph without past; also raises as `find_past_inputs`.
        MemoryError if the cache does not fit.
        """
        if min(pages, page_size, capacity) < 1:
            raise ValueError(f"expected at least 1, got {pages=}, {page_size=}, {capacity=}")
        found = find_past_inputs(graph)
        if found is None:
            raise UnsupportedError("expected a decoder with inputs past_key_values.N.key and .value", where=graph.name)
        self._names: PastInputs = found
        self._dtypes = {value.name: value.tensor.dtype.numpy for value in graph.inputs}
        self.page_size, self.page_count, self.capacity = page_size, pages, capacity
        self.vocabulary, self.context = vocabulary, context
        self._session = compile(graph, threads=threads, max_batch=capacity, new_shapes="wait", cache_dir=cache_dir)
        tokens, dtype = pages * page_size, found.dtype.numpy
        self._cache = PagedArrays(len(found.caches), found.kv_heads, found.head_size, tokens, dtype)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what is compiled at first runs: an empty past and a past with tokens, one token and several."""
        for count, position in _WARM_UP:
            if position + count <= min(self.context, self.capacity, self.page_size):
                self.run([Chunk(np.zeros(count, np.int64), position, (0,))])

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Logits [sum of wanted, vocabulary] of the wanted tokens, in the order of the chunks. Fills the pages.

        Raises as `run_in_groups`.
        """
        return run_in_groups(self, chunks, lambda chunk: None, self._run_group)

    def _run_group(self, chunks: Sequence[Chunk], slots: Slots) -> NDArray[np.float32]:
        names, position = self._names, chunks[0].position
        batch, end = slots.shape
        feeds: dict[str, Array] = {names.tokens: np.stack([chunk.tokens for chunk in chunks])}
        if names.mask is not None:
            feeds[names.mask] = np.ones((batch, end), np.int64)
        if names.positions is not None:
            feeds[names.positions] = np.tile(np.arange(position, end), (batch, 1))
        feeds = {name: array.astype(self._dtypes[name], copy=False) for name, array in feeds.items()}
        pasts = self._cache.read(slots[:, :position])
        feeds |= {cache.input: past for cache, past in zip(names.caches, pasts, strict=True)}
        outputs = self._session.run(feeds)
        self._cache.write(slots[:, position:], [outputs[cache.output][:, :, position:end] for cache in names.caches])
        return np.asarray(outputs[names.logits], np.float32)

    def close(self) -> None:
        """Free code and weights. Further runs raise SessionClosed."""
        self._session.close()
