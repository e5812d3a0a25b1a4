"""`load_language_model`: a decoder from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph
from lathe.core.language import gguf_model, gguf_tokenizer, hugging_face
from lathe.core.language.decoder import Decoder
from lathe.core.language.document import Document
from lathe.core.language.folder_texts import chat_template, folder_tokenizer
from lathe.core.language.gguf import read_gguf
from lathe.core.language.json_file import read_json
from lathe.core.language.safetensors import read_checkpoint
from lathe.core.language.settings import DecoderSettings
from lathe.core.language.special_tokens import folder_tokens, gguf_tokens
from lathe.core.language.stored_tensor import StoredTensor, element_count
from lathe.core.language.tokenizer import Tokenizer
from lathe.core.language.weight_sources import check_sizes, load_weights
from lathe.core.nn import init
from lathe.core.nn.trace import trace


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with its weights in `module`. `chat_template` is the text of a Jinja template.

    `module` is an `nn` module with parameters in float32, so it can be run eagerly, trained and traced.
    `special_tokens` has the texts of tokens that templates name, such as `bos_token`.
    """

    settings: DecoderSettings
    module: Decoder
    chat_template: str | None
    _tokenizer: Callable[[], Tokenizer] = field(repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def graph(self) -> Graph:
        """The decoder as a graph: `input_ids` int64 [batch, length] -> `logits` float32 [batch, length, vocabulary]."""
        return trace(self.module, {"input_ids": "int64[batch,length]"}, ["logits"], self.settings.family)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. ModelError if the files have none; UnsupportedError without the library `tokenizers`."""
        return self._tokenizer()


def load_language_model(path: str | os.PathLike[str]) -> LanguageModel:
    """The decoder in a Hugging Face folder, or in a GGUF file.

    A folder has `config.json`, `model.safetensors` or several such files with an index, and for the tokenizer
    `tokenizer.json`. Families: Llama (SmolLM and SmolLM2, too), SmolLM3, Mistral, Mixtral, Qwen2,
    Qwen3 and their mixtures of experts, GPT-2. Weights become float32.
    ModelError for files that are missing or damaged, and UnsupportedError for another family, type or setting.
    """
    place = Path(path)
    return _from_folder(place) if place.is_dir() else _from_gguf(place)


def _from_folder(folder: Path) -> LanguageModel:
    config = Document("config.json", read_json(folder / "config.json"))
    settings, tensors = hugging_face.read_settings(config), read_checkpoint(folder)
    module = _new_decoder(settings, tensors, "config.json")
    source = hugging_face.weight_source(settings, tensors)
    load_weights(module, tensors, source, hugging_face.UNUSED, "model.safetensors")
    template, special = chat_template(folder), folder_tokens(folder)
    return LanguageModel(settings, module, template, lambda: folder_tokenizer(folder, config), special)


def _from_gguf(path: Path) -> LanguageModel:
    file = read_gguf(path)
    settings = gguf_model.read_settings(file)
    module = _new_decoder(settings, file.tensors, file.name)
    load_weights(module, file.tensors, gguf_model.weight_source(settings), gguf_model.UNUSED, file.name)
    template = Document(file.name, file.metadata).text("tokenizer.chat_template")
    return LanguageModel(settings, module, template, lambda: gguf_tokenizer.make_tokenizer(file), gguf_tokens(file))


def _new_decoder(settings: DecoderSettings, tensors: Mapping[str, StoredTensor], where: str) -> Decoder:
    """A decoder of these settings without weights. ModelError if the file cannot have as many weights as it needs."""
    check_sizes(settings.largest_weight, settings.layers, tensors, where)
    total = sum(element_count(each.shape, each.name, where) for each in tensors.values())
    if settings.expert_elements > total:
        message = f"needs experts of {settings.expert_elements} elements in a layer; all tensors have {total}"
        raise ModelError(message, where=where)
    with init.skipped():
        return Decoder(settings)
