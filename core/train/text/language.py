"""`Language`: what a language model needs besides its weights, stored in the metadata of its ONNX file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lathe.core.errors import ModelError
from lathe.core.language.document import Document
from lathe.core.language.hugging_face import read_settings
from lathe.core.language.language_model import LanguageModel
from lathe.core.language.settings import DecoderSettings
from lathe.core.language.tokenizer import Tokenizer, parse_tokenizer

KEY = "language"  # among the model's metadata


@dataclass(frozen=True)
class Language:
    """The settings of the decoder, its tokenizer and its chat template, if any.

    `special_tokens` has the texts of tokens that templates name, such as `bos_token`.
    """

    settings: DecoderSettings
    tokenizer: Tokenizer
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def end(self) -> int:
        """The token that ends a document. ModelError if the tokenizer has none."""
        if not self.tokenizer.ends:
            raise ModelError("expected a token that ends a text, got none", where="tokenizer")
        return self.tokenizer.ends[0]

    def dump(self) -> str:
        """The language as JSON, for the metadata of an ONNX file. UnsupportedError for a family without a config."""
        from lathe.core.language.hugging_face_writer import config_of

        return json.dumps(
            {
                "config": config_of(self.settings),
                "tokenizer": json.loads(self.tokenizer.library.to_str()),
                "ends": self.tokenizer.ends,
                "chat_template": self.chat_template,
                "special_tokens": dict(self.special_tokens),
            }
        )


def parse_language(text: str) -> Language:
    """The inverse of `Language.dump`. ModelError for text that is none, UnsupportedError without `tokenizers`."""
    try:
        found: Any = json.loads(text)
        fields = {name: found[name] for name in ("config", "tokenizer", "ends", "chat_template", "special_tokens")}
        ends = tuple(int(token) for token in fields["ends"])
        special = {str(name): str(token) for name, token in fields["special_tokens"].items()}
        template = None if fields["chat_template"] is None else str(fields["chat_template"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"metadata '{KEY}' cannot be read: {error!r}", where="model") from None
    settings = read_settings(Document(f"metadata '{KEY}'", fields["config"]))
    library = parse_tokenizer(json.dumps(fields["tokenizer"]).encode(), f"metadata '{KEY}'")
    return Language(settings, Tokenizer(library, ends), template, special)


def language_of_model(model: LanguageModel) -> Language:
    """The language of a model from a Hugging Face folder or a GGUF file."""
    return Language(model.settings, model.tokenizer, model.chat_template, model.special_tokens)
