"""A small seeded Whisper that transcribes: settings, tokens, sounds. Scripts of other environments import this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16_000
BYTES = 256  # the first tokens are the bytes of UTF-8
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>",
    "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, _, PLAIN = range(BYTES, BYTES + len(SPECIAL))
VOCABULARY, POSITIONS = 300, 70
SECONDS = 1  # of the model's spectrogram

CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 72, "decoder_ffn_dim": 56, "max_source_positions": 50,
    "max_target_positions": POSITIONS, "pad_token_id": END, "bos_token_id": END, "eos_token_id": END,
    "decoder_start_token_id": START, "begin_suppress_tokens": None,
}  # fmt: skip
# Bytes that are no characters are suppressed, so that each token is a character.
GENERATION: dict[str, Any] = {
    "is_multilingual": True, "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "no_timestamps_token_id": PLAIN,
    "prev_sot_token_id": PREVIOUS, "begin_suppress_tokens": [84, 125, END], "return_timestamps": False,
    "suppress_tokens": [*range(32), *range(127, BYTES), *range(START, VOCABULARY)], "max_length": POSITIONS,
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END,
}  # fmt: skip

SOUNDS = 6
# Name -> the number of a sound, the language (None: the likeliest one), and the text before.
CASES: dict[str, tuple[int, str | None, str]] = {
    "english": (0, "en", ""),
    "german": (0, "de", ""),
    "detected": (1, None, ""),
    "after": (2, "en", "Petals, sepals"),
}


def sound(number: int) -> Any:
    """0.9 seconds, float32: a tone whose pitch and loudness change, and noise. Its samples are those of 16 bits."""
    time = np.arange(int(0.9 * RATE)) / RATE
    rng = np.random.default_rng(number)
    tone = np.sin(2 * np.pi * (220 + 180 * number + 400 * time) * time) * (0.2 + 0.3 * np.sin(9 * time + number))
    return (np.round((tone + rng.normal(0, 0.02, time.shape)) * 32768) / 32768).astype(np.float32)


def write_speech(folder: Path) -> Path:
    """The folder of the model, as `speech.json` describes it."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tests.core.language.checkpoints import weight

    recorded = json.loads((Path(__file__).parent / "speech.json").read_text())
    tensors = {key: weight("speech", key, tuple(shape)) for key, shape in recorded["shapes"].items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    made = Tokenizer(models.BPE(_bytes(), []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    return folder


def _bytes() -> dict[str, int]:
    """The characters with which byte-level tokenizers write the 256 bytes, as tokens of these numbers."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}
