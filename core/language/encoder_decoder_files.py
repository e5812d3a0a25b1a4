"""Settings and names of weights of encoder-decoders in a Hugging Face folder.

Defaults of missing fields are those of the library Transformers, which leaves some of them out of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lathe.core.errors import UnsupportedError
from lathe.core.language.decoder import ACTIVATIONS
from lathe.core.language.document import MOST_LAYERS, Document
from lathe.core.language.t5 import T5Settings
from lathe.core.language.weight_sources import WeightSource
from lathe.core.language.whisper import StackSettings, WhisperSettings

EncoderDecoderSettings = T5Settings | WhisperSettings
FAMILIES = ("t5", "mt5", "whisper")

# Copies of the embedding, a bias that older versions of Transformers wrote, and copies of tied weights. Where weights
# are not tied, `lm_head.weight` and `proj_out.weight` are read, so they are never unused there.
UNUSED = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight|proj_out\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)


def read_settings(config: Document, names: Collection[str]) -> EncoderDecoderSettings:
    """The settings in a `config.json`, of a model whose files have tensors of these names.

    UnsupportedError for another `model_type`, and for settings that the modules lack. ModelError for a field that is
    missing or has no possible value.
    """
    family = config.choice("model_type", FAMILIES)
    if config.has("quantization_config"):
        raise UnsupportedError("quantization_config: quantized folders are not supported", where=config.where)
    match family:
        case "t5":
            return _t5(config, names)
        case "mt5":
            return _mt5(config, names)
    return _whisper(config)


def weight_source(settings: EncoderDecoderSettings, names: Collection[str]) -> Callable[[str], WeightSource]:
    """The function from the path of a parameter to its source in a file that has tensors of these names.

    Files of a bare Whisper, without its last product, have names without a leading `model.`.
    """
    bare = isinstance(settings, WhisperSettings) and not any(name.startswith("model.") for name in names)
    return lambda path: WeightSource(path.removeprefix("model.") if bare else path)


@dataclass(frozen=True)
class _T5Defaults:
    """The fields of T5's configurations whose defaults differ between its families."""

    vocabulary: int
    feedforward: int
    layers: int
    heads: int
    kind: str


_T5 = _T5Defaults(32128, 2048, 6, 8, "relu")
_MT5 = _T5Defaults(250112, 1024, 8, 6, "gated-gelu")


def _t5(config: Document, names: Collection[str]) -> T5Settings:
    """T5 1.1 and FLAN-T5 have `tie_word_embeddings` false: a last product with own weights and without scaling."""
    tied = config.flag("tie_word_embeddings", True)
    scaled = config.flag("scale_decoder_outputs", tied)  # newer files have this field, and say that weights are tied
    return _t5_settings(config, names, "t5", _T5, scaled)


def _mt5(config: Document, names: Collection[str]) -> T5Settings:
    """mT5 is T5 1.1 with other defaults (Xue et al., 2020): its results are never scaled."""
    return _t5_settings(config, names, "mt5", _MT5, False)


def _t5_settings(
    config: Document, names: Collection[str], family: str, default: _T5Defaults, scaled: bool
) -> T5Settings:
    layers = config.size("num_layers", default.layers, most=MOST_LAYERS)
    kind = config.text("feed_forward_proj") or default.kind
    activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if activation not in ACTIVATIONS:
        expected = f"one of {', '.join(ACTIVATIONS)}, or gated- and one of them"
        raise UnsupportedError(f"feed_forward_proj: expected {expected}, got {kind}", where=config.where)
    return T5Settings(
        family=family,
        vocabulary=config.size("vocab_size", default.vocabulary),
        width=config.size("d_model", 512),
        heads=config.size("num_heads", default.heads),
        head_size=config.size("d_kv", 64),
        feedforward=config.size("d_ff", default.feedforward),
        encoder_layers=layers,
        decoder_layers=config.size("num_decoder_layers", layers, most=MOST_LAYERS),
        buckets=config.size("relative_attention_num_buckets", 32, most=1024),
        distance=config.size("relative_attention_max_distance", 128, most=1 << 16),
        epsilon=config.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        gated=kind.startswith("gated-"),
        scaled=scaled,
        tied=scaled or "lm_head.weight" not in names,
        start=_token(config, "decoder_start_token_id", 0),
    )


def _whisper(config: Document) -> WhisperSettings:
    if config.flag("scale_embedding", False):
        raise UnsupportedError("scale_embedding: only false is supported", where=config.where)
    encoder, decoder = (
        StackSettings(
            layers=config.size(f"{side}_layers", 4, most=MOST_LAYERS),
            heads=config.size(f"{side}_attention_heads", 6),
            feedforward=config.size(f"{side}_ffn_dim", 1536),
            positions=config.size(*positions),
        )
        for side, positions in (("encoder", ("max_source_positions", 1500)), ("decoder", ("max_target_positions", 448)))
    )
    return WhisperSettings(
        family="whisper",
        vocabulary=config.size("vocab_size", 51865),
        width=config.size("d_model", 384),
        mels=config.size("num_mel_bins", 80),
        encoder=encoder,
        decoder=decoder,
        activation=config.choice("activation_function", list(ACTIVATIONS), "gelu"),
        tied=config.flag("tie_word_embeddings", True),
        start=_token(config, "decoder_start_token_id", 50257),
    )


def _token(config: Document, name: str, default: int) -> int:
    found = config.get(name)
    found = default if found is None else found
    if type(found) is not int or found < 0:
        raise config.error(name, "a token", found)
    return found
