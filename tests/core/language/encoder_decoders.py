"""Small seeded encoder-decoders: settings by Transformers' names, their inputs, and sound for the front end of Whisper.

Scripts of other environments import this file: it needs NumPy alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VOCABULARY = 97
NEW = 64  # greedy tokens after the start
BEGIN = (3, 20, 33, 41)  # as the start, language, task and form of a Whisper's text
TARGET = np.random.default_rng(6).integers(4, VOCABULARY, (2, 13))
STEPS, RATE = 3, 0.003  # of training by stochastic gradient descent

_T5 = {
    "vocab_size": VOCABULARY, "d_model": 48, "d_kv": 10, "d_ff": 72, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 72, "decoder_ffn_dim": 56, "max_source_positions": 50,
    "max_target_positions": 70, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    "begin_suppress_tokens": None,
}  # fmt: skip

# Name -> the class of the configuration in Transformers, its arguments, and tensors that its folder has besides.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "t5": ("T5Config", {**_T5, "relative_attention_num_buckets": 16, "relative_attention_max_distance": 20}, {}),
    "t5-gated": (
        "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
        {"lm_head.weight": (VOCABULARY, 48)},
    ),
    "mt5": ("MT5Config", _T5, {}),
    "mt5-untied": ("MT5Config", {**_T5, "tie_word_embeddings": False}, {"lm_head.weight": (VOCABULARY, 48)}),
    "whisper": ("WhisperConfig", _WHISPER, {}),
}

BANDS = (80, 128)  # of published models
SAMPLES = 480_000  # 30 seconds
EVERY = 40  # of the frames of a spectrogram, one in so many is recorded


def source(name: str) -> tuple[str, Any]:
    """The name and the elements of the encoder's input, two sequences."""
    rng = np.random.default_rng(8)
    if "t5" in name:
        return "input_ids", rng.integers(4, VOCABULARY, (2, 40))
    return "input_features", rng.normal(0, 0.6, (2, 80, 100)).astype(np.float32)


def sound() -> Any:
    """Twelve seconds at 16 kHz: a rising tone, noise, and silence between them."""
    time = np.arange(12 * 16_000) / 16_000
    noise = np.random.default_rng(9).normal(0, 0.1, time.shape) * (time > 6)
    return (0.5 * np.sin(2 * np.pi * (200 + 300 * time) * time) * (time < 5) + noise).astype(np.float32)
