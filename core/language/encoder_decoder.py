"""`load_encoder_decoder`: T5 or Whisper from a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.language import encoder_decoder_files
from lathe.core.language.document import Document
from lathe.core.language.encoder_decoder_files import EncoderDecoderSettings
from lathe.core.language.folder_texts import folder_tokenizer
from lathe.core.language.json_file import read_json
from lathe.core.language.log_mel import LogMel
from lathe.core.language.safetensors import read_checkpoint
from lathe.core.language.speech_tokens import SpeechTokens, read_speech_tokens
from lathe.core.language.t5 import T5, T5Settings
from lathe.core.language.tokenizer import Tokenizer
from lathe.core.language.weight_sources import check_sizes, load_weights
from lathe.core.language.whisper import Whisper, WhisperSettings
from lathe.core.nn import init
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor
from lathe.core.nn.trace import trace


@dataclass(frozen=True)
class EncoderDecoderModel:
    """A T5 or a Whisper with its weights in `module`, an `nn` module that can be run eagerly, trained and traced.

    The encoder runs once for a source, the decoder for each beginning of a target: two graphs. The input of the encoder
    is `input_ids`, int64 [batch, length], for T5, and `input_features`, float32 [batch, mels, frames], for Whisper.
    """

    settings: EncoderDecoderSettings
    module: T5 | Whisper
    _tokenizer: Callable[[], Tokenizer] = field(repr=False)
    _speech_tokens: Callable[[], SpeechTokens] | None = field(default=None, repr=False)
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def encoder_graph(self) -> Graph:
        """The source -> `encoded`, float32 [batch, source length, width]."""
        return trace(_Encoding(self.module), self._source, ["encoded"], f"{self.settings.family}_encoder")

    @cached_property
    def decoder_graph(self) -> Graph:
        """`decoder_input_ids` int64 [batch, length] and `encoded` -> `logits` float32 [batch, length, vocabulary]."""
        source = self.settings.encoder.positions if isinstance(self.settings, WhisperSettings) else "source"
        inputs = {**_TARGET, "encoded": f"float32[batch,{source},{self.settings.width}]"}
        return trace(_Decoding(self.module), inputs, ["logits"], f"{self.settings.family}_decoder")

    @cached_property
    def graph(self) -> Graph:
        """Both in one graph, for training and export: the source and `decoder_input_ids` -> `logits`."""
        return trace(self.module, {**self._source, **_TARGET}, ["logits"], self.settings.family)

    @cached_property
    def features_graph(self) -> Graph:
        """For Whisper: `audio`, float32 [batch, samples] of 16 kHz -> `input_features`. UnsupportedError for others.

        `samples` are those of all frames, 30 seconds in published models: see `log_mel.padded_audio`.
        """
        if not isinstance(self.settings, WhisperSettings):
            raise UnsupportedError(f"{self.settings.family} has no sound as input")
        inputs = {"audio": f"float32[batch,{self.settings.samples}]"}
        return trace(LogMel(self.settings.mels), inputs, ["input_features"], "log_mel")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. ModelError if the folder has none; UnsupportedError without the library `tokenizers`."""
        return self._tokenizer()

    @cached_property
    def speech_tokens(self) -> SpeechTokens:
        """For Whisper: the tokens in `generation_config.json`; raises as `read_speech_tokens`.

        UnsupportedError for others.
        """
        if self._speech_tokens is None:
            raise UnsupportedError(f"{self.settings.family} has no sound as input")
        return self._speech_tokens()

    @property
    def _source(self) -> dict[str, str]:
        if isinstance(self.settings, T5Settings):
            return {"input_ids": "int64[batch,source]"}
        return {"input_features": f"float32[batch,{self.settings.mels},{self.settings.frames}]"}


_TARGET = {"decoder_input_ids": "int64[batch,length]"}


class _Encoding(Module):
    def __init__(self, whole: T5 | Whisper) -> None:
        self.whole = whole

    def forward(self, source: Tensor) -> Tensor:
        return self.whole.encode(source)


class _Decoding(Module):
    def __init__(self, whole: T5 | Whisper) -> None:
        self.whole = whole

    def forward(self, ids: Tensor, encoded: Tensor) -> Tensor:
        return self.whole.decode(ids, encoded)


def is_encoder_decoder(folder: Path) -> bool:
    """Whether the `config.json` of a folder names a family of encoder-decoders. ModelError for damaged JSON."""
    path = folder / "config.json"
    return path.exists() and read_json(path).get("model_type") in encoder_decoder_files.FAMILIES


def load_encoder_decoder(path: str | os.PathLike[str]) -> EncoderDecoderModel:
    """The encoder-decoder in a Hugging Face folder: T5 (1.1 and FLAN-T5, too), mT5 or Whisper.

    A folder has `config.json`, `model.safetensors` or several such files with an index, and for the tokenizer
    `tokenizer.json`. Weights become float32. ModelError for files that are missing or damaged, and UnsupportedError for
    another family or setting.
    """
    folder = Path(path)
    config, where = Document("config.json", read_json(folder / "config.json")), "model.safetensors"
    tensors = read_checkpoint(folder)
    settings = encoder_decoder_files.read_settings(config, tensors.keys())
    check_sizes(settings.largest_weight, settings.layers, tensors, config.where)
    with init.skipped():
        module: T5 | Whisper = T5(settings) if isinstance(settings, T5Settings) else Whisper(settings)
    source = encoder_decoder_files.weight_source(settings, tensors.keys())
    load_weights(module, tensors, source, encoder_decoder_files.UNUSED, where)
    speech = None
    if isinstance(settings, WhisperSettings):
        speech = partial(read_speech_tokens, folder, settings.start, settings.vocabulary)
    return EncoderDecoderModel(settings, module, lambda: folder_tokenizer(folder, config), speech)
