"""`CachedDecoder`: a compiled decoder that keeps the keys and values of earlier tokens in a cache of pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.options import make_options
from lathe.core.ir.types import DType
from lathe.core.language.adapters import Adapter
from lathe.core.language.cached_graph import CacheLayout, head_graph, step_graph
from lathe.core.language.generation.options import CacheType
from lathe.core.language.language_model import LanguageModel
from lathe.core.language.packed_decoder import PackedDecoder, compiled_head, compiled_step
from lathe.core.language.weight_sources import StoredWeight
from lathe.core.runtime.host.memory import owner_of, release_pages, return_to_system

CACHE_TYPES = get_args(CacheType)


class CachedDecoder(PackedDecoder):
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
        layout = CacheLayout(pages, page_size, _cache_dtype(cache_dtype))
        options = make_options(precision=precision, threads=threads, max_batch=capacity, cache_dir=cache_dir)
        super().__init__(
            compiled_step(step_graph(model.module, layout, precision, adapters), options),
            compiled_head(head_graph(model.module, precision), options),
            vocabulary=settings.vocabulary,
            context=settings.context,
            pages=pages,
            page_size=page_size,
            capacity=capacity,
            adapters=len(adapters),
        )
        self._release(model)
        self._embedding = model.module.model.embed_tokens.weight

    def _release(self, model: LanguageModel) -> None:
        """Return the memory of compilation, and drop the pages of weight files, whose weights the plans hold now."""
        return_to_system(sum(executable.plan.weights for executable in self.executables))
        sources = (parameter.source for _, parameter in model.module.named_state())
        tensors = [tensor for each in sources if isinstance(each, StoredWeight) for tensor in each.tensors]
        files = [owner_of(tensor.data) for tensor in tensors]
        for file in {id(file): file for file in files}.values():
            release_pages(file)

    def _inputs(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of the embedding for tokens: those of a stored table are read where they are stored."""
        source = self._embedding.source
        rows = source.rows(tokens) if isinstance(source, StoredWeight) else self._embedding.data[tokens]
        return np.ascontiguousarray(rows, np.float32)


def _cache_dtype(name: str) -> DType:
    if name not in CACHE_TYPES:
        raise ValueError(f"cache_dtype: expected one of {', '.join(CACHE_TYPES)}, got {name!r}")
    return DType.parse(name)
