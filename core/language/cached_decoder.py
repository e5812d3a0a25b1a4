"""`CachedDecoder`: a compiled decoder that keeps the keys and values of earlier tokens in a cache of pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.options import Options, make_options
from lathe.core.compiler.pipeline import compile_host_executable
from lathe.core.errors import FeedError
from lathe.core.ir.types import DType
from lathe.core.language.adapters import Adapter
from lathe.core.language.cached_graph import CacheLayout, head_graph, step_graph
from lathe.core.language.language_model import LanguageModel
from lathe.core.language.token_runner import Chunk
from lathe.core.language.weight_sources import StoredWeight
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.host.memory import owner_of, release_pages, return_to_system

CACHE_TYPES = ("float32", "float16", "bfloat16", "int8")
_BATCHING = BatchInfo(False, "tokens read the cache, which other tokens write", "n")


class CachedDecoder:
    """Runs tokens of many sequences together: implements `lathe.core.language.token_runner.TokenRunner`.

    The code is compiled once, for any number of tokens and any lengths; runs write the cache in place. Not
    thread-safe: one run at a time.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        pages: int,
        page_size: int = 32,
        capacity: int = 512,
        threads: int | None = None,
        precision: str = "float32",
        cache_dtype: str = "float32",
        cache_dir: str | os.PathLike[str] | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Compile the decoder for runs of at most `capacity` tokens, and claim the memory of the cache.

        The cache has `pages` pages of `page_size` tokens, a multiple of 8 up to 64, in elements of `cache_dtype`:
        float32, float16, bfloat16 or int8 with a scale for each token and head. `page_bytes` (in `cached_graph.py`)
        gives the bytes of a page. ValueError for other numbers; MemoryError if the cache does not fit. `precision` is
        that of `lathe.compile`. Weights that a GGUF file holds in 4 or 8 bits stay in these bits. Chunks choose one of
        the `adapters` by its number from 1 on.
        """
        if pages < 1 or capacity < 1 or page_size not in range(8, 65, 8):
            raise ValueError(
                "expected at least 1 page and 1 token, and pages of 8, 16, ... 64 tokens; "
                f"got pages={pages}, capacity={capacity}, page_size={page_size}"
            )
        settings = model.settings
        self.page_size, self.page_count, self.capacity = page_size, pages, capacity
        self.vocabulary, self.context, self.adapter_count = settings.vocabulary, settings.context, len(adapters)
        layout = CacheLayout(pages, page_size, _cache_dtype(cache_dtype))
        options = make_options(precision=precision, threads=threads, max_batch=capacity, cache_dir=cache_dir)
        self._step = _compiled_step(model, layout, options, adapters)
        self._head = compile_host_executable(head_graph(model.module, precision), options, BatchInfo(True, "", "n"), ())
        self._release(model)
        self._embedding = model.module.model.embed_tokens.weight
        self._tables = np.zeros((capacity, layout.table_pages(settings)), np.int64)

    def _release(self, model: LanguageModel) -> None:
        """Return the memory of compilation, and drop the pages of weight files, whose weights the plans hold now."""
        return_to_system(sum(executable.plan.weights for executable in self.executables))
        sources = (parameter.source for _, parameter in model.module.named_state())
        tensors = [tensor for each in sources if isinstance(each, StoredWeight) for tensor in each.tensors]
        files = [owner_of(tensor.data) for tensor in tensors]
        for file in {id(file): file for file in files}.values():
            release_pages(file)

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Logits [sum of wanted, vocabulary] of the wanted tokens, in the order of the chunks. Fills the pages.

        FeedError for a chunk without tokens or beyond the context, for pages that do not cover it or do not exist, and
        for more tokens than `capacity`.
        """
        count = sum(len(chunk.tokens) for chunk in chunks)
        if count > self.capacity:
            raise FeedError(f"chunks: expected at most {self.capacity} tokens, got {count}")
        tokens, positions, sequences, slots, adapters = (np.empty(count, np.int64) for _ in range(5))
        wanted: list[NDArray[np.int64]] = []
        start = 0
        for number, chunk in enumerate(chunks):
            stop = start + len(chunk.tokens)
            self._fill_table(number, chunk)
            places = np.arange(chunk.position, chunk.position + stop - start)
            tokens[start:stop], positions[start:stop], sequences[start:stop] = chunk.tokens, places, number
            adapters[start:stop] = chunk.adapter
            pages = self._tables[number, places // self.page_size]
            slots[start:stop] = pages * self.page_size + places % self.page_size
            wanted.append(np.arange(stop - chunk.wanted, stop))
            start = stop
        if not count:
            return np.empty((0, self.vocabulary), np.float32)
        embedded = self._embedded(tokens)
        feeds: list[NDArray[Any]] = [embedded, positions, sequences, slots, self._tables[:count]]
        (hidden,) = self._step.run(count, [*feeds, adapters] if self.adapter_count else feeds)
        rows = hidden[np.concatenate(wanted)]
        if not len(rows):
            return np.empty((0, self.vocabulary), np.float32)
        logits: NDArray[np.float32] = self._head.run(len(rows), [rows])[0]
        return logits

    def _embedded(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of the embedding for tokens: those of a stored table are read where they are stored."""
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise FeedError(f"tokens: expected 0 to {self.vocabulary - 1}, got {tokens.min()} to {tokens.max()}")
        source = self._embedding.source
        rows = source.rows(tokens) if isinstance(source, StoredWeight) else self._embedding.data[tokens]
        return np.ascontiguousarray(rows, np.float32)

    def _fill_table(self, number: int, chunk: Chunk) -> None:
        """Check a chunk, and put its pages into row `number` of the tables."""
        length = len(chunk.tokens)
        end = chunk.position + length
        if not length or chunk.position < 0 or end > self.context:
            raise FeedError(
                f"chunk {number}: expected 1 or more tokens at positions of 0 to {self.context - 1}, "
                f"got {length} at {chunk.position}"
            )
        if not 0 <= chunk.wanted <= length:
            raise FeedError(f"chunk {number}: wanted: expected 0 to {length}, got {chunk.wanted}")
        if not 0 <= chunk.adapter <= self.adapter_count:
            raise FeedError(f"chunk {number}: adapter: expected 0 to {self.adapter_count}, got {chunk.adapter}")
        needed = -(-end // self.page_size)
        pages = np.asarray(chunk.pages[:needed], np.int64)
        if len(pages) < needed or pages.min() < 0 or pages.max() >= self.page_count:
            raise FeedError(
                f"chunk {number}: pages: expected {needed} numbers of 0 to {self.page_count - 1}, got {chunk.pages}"
            )
        self._tables[number, :needed] = pages

    @property
    def executables(self) -> tuple[Executable, Executable]:
        """The code of a step, tokens to hidden states, and of the head, hidden states to logits."""
        return self._step, self._head

    def close(self) -> None:
        """Free code, weights and cache. Further runs raise SessionClosed."""
        self._step.close()
        self._head.close()


def _compiled_step(
    model: LanguageModel, layout: CacheLayout, options: Options, adapters: Sequence[Adapter]
) -> Executable:
    """The code of a step, with an empty cache."""
    graph = step_graph(model.module, layout, options.precision, adapters)
    made = compile_host_executable(graph, options, _BATCHING, ())
    for state in graph.states:
        # Zeros from the operating system: pages of memory that no token has reached cost nothing.
        made.adopt_state(state.value.name, np.zeros(state.value.tensor.evaluate({}), state.initial.dtype))
    return made


def _cache_dtype(name: str) -> DType:
    if name not in CACHE_TYPES:
        raise ValueError(f"cache_dtype: expected one of {', '.join(CACHE_TYPES)}, got {name!r}")
    return DType.parse(name)
