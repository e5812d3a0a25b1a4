"""`TextGenerator`: a language model that answers: its tokenizer, its chat template, and an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lathe.core.errors import FeedError
from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.cached_graph import page_bytes
from lathe.core.language.constraint import GrammarCompiler
from lathe.core.language.generation.chat_template import ChatTemplate
from lathe.core.language.generation.engine import Engine
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.gguf import read_gguf
from lathe.core.language.gguf_codes import can_split
from lathe.core.language.language_model import LanguageModel, load_language_model
from lathe.core.language.safetensors import read_checkpoint
from lathe.core.language.settings import DecoderSettings
from lathe.core.language.stored_tensor import StoredTensor, element_count
from lathe.core.language.token_runner import Chunk, TokenRunner
from lathe.core.language.tokenizer import Tokenizer

_PAGE_SIZE = 32  # tokens
_CAPACITY = 512  # tokens of a run
SEQUENCES = 64  # texts that run at once


def make_runner(model: LanguageModel, options: GeneratorOptions) -> TokenRunner:
    """The runner of a model that is served."""
    pages = page_count(model.settings, options.cache_bytes)
    return CachedDecoder(model, pages=pages, page_size=_PAGE_SIZE, capacity=_CAPACITY, threads=options.threads)


def page_count(settings: DecoderSettings, cache_bytes: int) -> int:
    """The pages of a cache of this size: at least one, and no more than all texts that run at once can use."""
    most = SEQUENCES * -(-settings.context // _PAGE_SIZE)
    return max(1, min(most, cache_bytes // page_bytes(settings, _PAGE_SIZE)))


def memory_bytes(path: Path, options: GeneratorOptions) -> int:
    """The most memory that a model needs in bytes: its weights, and the cache.

    Reads the descriptions of its tensors only. ModelError for a damaged file.
    """
    tensors = read_checkpoint(path) if path.is_dir() else read_gguf(path).tensors
    return sum(_weight_bytes(each, path.name) for each in tensors.values()) + options.cache_bytes


def _weight_bytes(tensor: StoredTensor, where: str) -> int:
    """The bytes of a weight: the compiled copy, and one that is read while it is made if the file has other numbers."""
    elements = element_count(tensor.shape, tensor.name, where)
    # Codes take a byte at most, and a scale and an offset of two bytes each for 16 elements or more.
    return elements * 5 // 4 if can_split(tensor) else 2 * 4 * elements


class TextGenerator:
    """Generates texts with a language model. `close` ends all texts, and frees the memory."""

    def __init__(self, model: LanguageModel, options: GeneratorOptions | None = None, name: str = "model") -> None:
        """Compile the model. UnsupportedError if it has no tokenizer that can be read."""
        self.model = model
        self.tokenizer: Tokenizer = model.tokenizer
        runner = make_runner(model, options or GeneratorOptions())
        runner.run([Chunk(np.zeros(1, np.int64), 0, (0,))])  # what is compiled at the first run is compiled now
        self.engine = Engine(runner, self.tokenizer.decode, sequences=SEQUENCES, name=name)

    @classmethod
    def open(cls, path: str | os.PathLike[str], options: GeneratorOptions | None = None) -> TextGenerator:
        """The generator of a model in a Hugging Face folder or a GGUF file. Raises as `load_language_model`."""
        return cls(load_language_model(path), options, Path(path).stem)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(self.tokenizer.ends)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template. FeedError if the model has none; otherwise raises as `ChatTemplate`."""
        if self.model.chat_template is None:
            raise FeedError("messages: the model has no chat template, so it only completes texts")
        return ChatTemplate(self.model.chat_template, self.model.special_tokens)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes constraints for requests. UnsupportedError without the library llguidance."""
        return GrammarCompiler(self.tokenizer, self.model.settings.vocabulary)

    def prompt_tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that is to be continued."""
        tokens = tuple(self.tokenizer.encode(text))
        begin = self.model.special_tokens.get("bos_token")
        if not tokens and begin is not None:
            tokens = tuple(self.tokenizer.encode(begin, special=False))
        return tokens

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> tuple[int, ...]:
        """The tokens of a conversation, with the beginning of the answer. Raises as `ChatTemplate.render`."""
        text = self.chat_template.render(messages, tools, **more)
        return tuple(self.tokenizer.encode(text, special=False))

    def close(self) -> None:
        self.engine.close()
