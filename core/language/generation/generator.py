"""`TextGenerator`: a language model that answers: its tokenizer, its chat template, and an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.ir.types import DType
from lathe.core.language.adapters import Adapter, read_adapter
from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.cached_graph import page_bytes
from lathe.core.language.constraint import GrammarCompiler
from lathe.core.language.encoder_decoder import EncoderDecoderModel, is_encoder_decoder, load_encoder_decoder
from lathe.core.language.encoder_decoder_runner import EncoderDecoderRunner, text_sizes
from lathe.core.language.generation.chat_template import ChatTemplate
from lathe.core.language.generation.drafting import Drafting
from lathe.core.language.generation.engine import Engine
from lathe.core.language.generation.model_drafter import ModelDrafter
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.generation.prompt_lookup import PromptLookup
from lathe.core.language.gguf import read_gguf
from lathe.core.language.gguf_codes import can_split
from lathe.core.language.language_model import LanguageModel, load_language_model
from lathe.core.language.onnx_decoder import OnnxDecoder, load_onnx_decoder, onnx_decoder_file
from lathe.core.language.paged_onnx_decoder import PagedOnnxDecoder
from lathe.core.language.past_runner import PastRunner
from lathe.core.language.safetensors import read_checkpoint, read_safetensors
from lathe.core.language.settings import DecoderSettings
from lathe.core.language.stored_tensor import StoredTensor, element_count
from lathe.core.language.t5 import T5Settings
from lathe.core.language.text_sizes import TextSizes
from lathe.core.language.token_bytes import TokenBytes
from lathe.core.language.token_runner import Chunk, TokenRunner
from lathe.core.language.tokenizer import Tokenizer
from lathe.core.language.transcriber import Transcriber
from lathe.core.language.whisper import WhisperSettings

_PAGE_SIZE = 32  # tokens
_CAPACITY = 512  # tokens of a run
_PANEL = 16  # float32 numbers: the widest vector
SEQUENCES = 64  # texts that run at once
_ONNX_COPIES = 2  # of the weights of an ONNX file in memory: the graph's, and those in the layouts of kernels


AdapterFiles = Mapping[str, tuple[Path, Path]]  # of each adapter the settings and the weights
Model = LanguageModel | OnnxDecoder | EncoderDecoderModel


def make_runner(model: Model, options: GeneratorOptions, adapters: Sequence[Adapter] = ()) -> TokenRunner:
    """The runner of a model that is served; `adapters` are those of a `LanguageModel`.

    UnsupportedError for a `cache_dtype` other than float32, unless the model is a `LanguageModel`.
    """
    pages, threads = page_count(model, options), options.threads
    if isinstance(model, LanguageModel):
        return _decoder(model, pages, options, adapters)
    if options.cache_dtype != "float32":
        raise UnsupportedError("cache_dtype: only decoders from Hugging Face folders and GGUF files have other types")
    if isinstance(model, OnnxDecoder):
        return _onnx_runner(model, pages, threads)
    return EncoderDecoderRunner(model, pages=pages, page_size=_PAGE_SIZE, capacity=_CAPACITY, threads=threads)


def _decoder(
    model: LanguageModel, pages: int, options: GeneratorOptions, adapters: Sequence[Adapter] = ()
) -> CachedDecoder:
    return CachedDecoder(
        model,
        pages=pages,
        page_size=_PAGE_SIZE,
        capacity=_CAPACITY,
        threads=options.threads,
        cache_dtype=options.cache_dtype,
        adapters=adapters,
    )


def make_drafting(model: Model, options: GeneratorOptions, draft: LanguageModel | None = None) -> Drafting | None:
    """The drafts of a model that is served; None without.

    `draft` is the draft model. ModelError if there is none although the options want one, or if it has another
    vocabulary. UnsupportedError for another model than a `LanguageModel`.
    """
    wanted = options.speculation or ("none" if draft is None else "model")
    if wanted == "none":
        return None
    if not isinstance(model, LanguageModel):
        raise UnsupportedError("speculation: only decoders from Hugging Face folders and GGUF files have drafts")
    if wanted == "lookup":
        return Drafting(PromptLookup(), options.draft_tokens)
    if draft is None:
        raise ModelError("speculation: 'model' needs a draft model, which this version lacks", where="generation")
    if draft.tokenizer.library.get_vocab() != model.tokenizer.library.get_vocab():
        raise ModelError("the draft model has another vocabulary than the model", where="draft")
    runner = _decoder(draft, page_count(model, options), options)  # as many tokens as in the model's cache
    runner.run([Chunk(np.zeros(1, np.int64), 0, (0,))])
    return Drafting(ModelDrafter(runner, model.settings.vocabulary), options.draft_tokens)


def _onnx_runner(model: OnnxDecoder, pages: int, threads: int | None) -> TokenRunner:
    """The runner that has tokens of many sequences in a run, if the graph has the form for it."""
    paged = PagedOnnxDecoder.of(
        model.path, model.settings, pages=pages, page_size=_PAGE_SIZE, capacity=_CAPACITY, threads=threads
    )
    return paged or PastRunner(
        model.graph,
        vocabulary=model.settings.vocabulary,
        context=model.settings.context,
        pages=pages,
        page_size=_PAGE_SIZE,
        capacity=_CAPACITY,
        threads=threads,
    )


def load_model(path: Path) -> Model:
    """The model in a Hugging Face folder or a GGUF file, or as ONNX file with past in a folder.

    Raises as `load_language_model`, `load_onnx_decoder` and `load_encoder_decoder`.
    """
    if path.is_dir() and onnx_decoder_file(path) is not None:
        return load_onnx_decoder(path)
    is_pair = path.is_dir() and is_encoder_decoder(path)
    return load_encoder_decoder(path) if is_pair else load_language_model(path)


def page_count(model: Model, options: GeneratorOptions) -> int:
    """The pages of a cache of this size: at least one, and no more than all texts that run at once can use.

    The cache of a Whisper has the keys and values of sounds, too, so it has pages for `sequence_count` texts.
    """
    sizes = _sizes(model)
    most = sequence_count(model, options) * -(-sizes.context // _PAGE_SIZE)
    return most if _reads_sound(model) else max(1, min(most, options.cache_bytes // _page_bytes(sizes, options)))


def sequence_count(model: Model, options: GeneratorOptions) -> int:
    """The most texts that run at once."""
    return max(1, min(SEQUENCES, options.cache_bytes // _sound_bytes(model))) if _reads_sound(model) else SEQUENCES


def _sound_bytes(model: Model) -> int:
    """The bytes of all keys and values of one text of a Whisper: those of the sound, and of the longest text."""
    assert isinstance(model.settings, WhisperSettings)
    sizes, positions = _sizes(model), model.settings.encoder.positions
    pages = -(-sizes.context // _PAGE_SIZE)
    return page_bytes(sizes, positions) + pages * page_bytes(sizes, _PAGE_SIZE)


def _reads_sound(model: Model) -> bool:
    return isinstance(model.settings, WhisperSettings)


def _sizes(model: Model) -> DecoderSettings | TextSizes:
    return text_sizes(model) if isinstance(model, EncoderDecoderModel) else model.settings


def _page_bytes(settings: DecoderSettings | TextSizes, options: GeneratorOptions) -> int:
    return page_bytes(settings, _PAGE_SIZE, DType.parse(options.cache_dtype))


def memory_bytes(
    path: Path, options: GeneratorOptions, adapters: AdapterFiles | None = None, draft: Path | None = None
) -> int:
    """An upper bound of the memory of a model in bytes: the weights of the compiled model, adapters, and the cache.

    A draft model counts with its own cache. Reads the descriptions of tensors and the settings only. ModelError for a
    damaged file.
    """
    found = _weight_bytes(path) + options.cache_bytes + _adapter_bytes(adapters or {})
    if path.is_dir() and is_encoder_decoder(path) and _reads_sound(speech := load_encoder_decoder(path)):
        found += max(0, _sound_bytes(speech) - options.cache_bytes)
    if draft is not None and options.speculation in (None, "model"):
        settings, model = load_language_model(draft).settings, load_model(path)
        if isinstance(model, LanguageModel):
            found += _weight_bytes(draft) + page_count(model, options) * _page_bytes(settings, options)
    return found


def _weight_bytes(path: Path) -> int:
    if path.is_dir() and onnx_decoder_file(path) is not None:
        return _ONNX_COPIES * sum(file.stat().st_size for file in path.iterdir())
    tensors = read_checkpoint(path) if path.is_dir() else read_gguf(path).tensors
    sizes = (_element_bytes(each) * element_count(each.shape, each.name, path.name) for each in tensors.values())
    return round(sum(sizes))


def _adapter_bytes(adapters: AdapterFiles) -> int:
    """The bytes of all adapters in the compiled model: of each factor as many times the largest one, and one more.

    Kernels fill rows up to a multiple of `_PANEL`.
    """
    largest: dict[str, int] = {}
    for _, weights in adapters.values():
        for name, tensor in read_safetensors(weights).items():
            count = element_count(tensor.shape, name, weights.name)
            rows = max(tensor.shape[0], 1) if tensor.shape else 1
            # GPT-2 has one layer for queries, keys and values; compiled, each of the three has both factors.
            parts = 3 if ".c_attn.lora_A" in name else 1
            padded = parts * (count // rows) * -(-rows // _PANEL) * _PANEL
            largest[name] = max(largest.get(name, 0), padded)
    return 4 * (len(adapters) + 1) * sum(largest.values())


def _element_bytes(tensor: StoredTensor) -> float:
    """The bytes of an element in the compiled model: codes stay codes, at most 8 bits with a scale for every 16."""
    return 1.25 if can_split(tensor) else 4


class TextGenerator:
    """Generates texts with a language model. `close` ends all texts, and frees the memory.

    `adapters` has the number of each adapter by name, for `GenerationRequest.adapter`. `transcriber` makes the requests
    for a Whisper, None for other models. `sequences`: the most texts that run at once.
    """

    def __init__(
        self,
        model: Model,
        options: GeneratorOptions | None = None,
        name: str = "model",
        adapters: Mapping[str, Adapter] | None = None,
        draft: LanguageModel | None = None,
    ) -> None:
        """Compile the model. UnsupportedError if it has no tokenizer that can be read; otherwise as `make_drafting`."""
        self.model = model
        self.tokenizer: Tokenizer = model.tokenizer
        given = adapters or {}
        self.adapters = {name: number for number, name in enumerate(given, 1)}
        options = options or GeneratorOptions()
        drafting = make_drafting(model, options, draft)
        runner = make_runner(model, options, list(given.values()))
        self.transcriber: Transcriber | None = None
        if isinstance(model, EncoderDecoderModel) and _reads_sound(model):
            self.transcriber = Transcriber(model, options.threads)
        if not isinstance(model, EncoderDecoderModel):
            runner.run([Chunk(np.zeros(1, np.int64), 0, (0,))])  # what is compiled at the first run is compiled now
        self.sequences = sequence_count(model, options)
        self.engine = Engine(
            runner,
            self.tokenizer.decode,
            sequences=self.sequences,
            drafting=drafting,
            start=model.settings.start if isinstance(model.settings, T5Settings) else None,
            reads_sound=self.transcriber is not None,
            name=name,
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        options: GeneratorOptions | None = None,
        adapters: AdapterFiles | None = None,
        draft: str | os.PathLike[str] | None = None,
    ) -> TextGenerator:
        """The generator of the model in a folder or file, with adapters by name and a draft model.

        Raises as `load_model`, `read_adapter` and `make_drafting`. UnsupportedError for adapters of another model
        than a `LanguageModel`.
        """
        model = load_model(Path(path))
        if adapters and not isinstance(model, LanguageModel):
            raise UnsupportedError("adapters: only decoders from Hugging Face folders and GGUF files have them")
        found: dict[str, Adapter] = {}
        if isinstance(model, LanguageModel):
            found = {name: read_adapter(model.module, *files) for name, files in (adapters or {}).items()}
        wanted = draft is not None and (options or GeneratorOptions()).speculation in (None, "model")
        return cls(model, options, Path(path).stem, found, load_language_model(draft) if wanted and draft else None)

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
        """The compiler of grammars, which makes constraints for requests.

        UnsupportedError without the library llguidance, or for a tokenizer that it cannot use.
        """
        return GrammarCompiler(self.tokenizer, self.model.settings.vocabulary)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.tokenizer)

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
        if self.transcriber is not None:
            self.transcriber.close()
