"""Turns a GGUF file or a Hugging Face folder into a language model in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from lathe.core.language.generation.options import GeneratorOptions
from lathe.server.backends.language import TextModel, language_model_needs, load_text_model
from lathe.server.repository.builder import BuiltModel
from lathe.server.repository.memory_budget import MemoryBudget, Owner


class LanguageBuilder:
    """Loads language models, in this process. Their memory is claimed before."""

    def __init__(self, memory: MemoryBudget | None = None, options: GeneratorOptions | None = None) -> None:
        self._memory = memory or MemoryBudget()
        self._options = options or GeneratorOptions()

    async def build(self, path: Path, owner: Owner, loading: Callable[[], None] = lambda: None) -> BuiltModel:
        """Load the model in `path`, with the memory limit of `owner`; `loading` is called before.

        The caller must close the model. Raises Unprocessable, or OutOfMemory if the memory budget is too small.
        """
        started, compilation = time.monotonic(), owner.config.build
        loading()
        model = await asyncio.to_thread(self._load, path, owner)
        return BuiltModel((), model, time.monotonic() - started, compilation)

    def _load(self, path: Path, owner: Owner) -> TextModel:
        options = owner.config.generation.options(self._options)
        needs = language_model_needs(path, options)
        claim = self._memory.claim(needs, owner)
        try:
            return load_text_model(path, options, needs, claim.release)
        except BaseException:
            claim.release()
            raise
