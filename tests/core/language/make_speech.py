"""Makes `speech.json` and `speech.npz`: the texts that Transformers' Whisper finds in the sounds of `speech.py`.

    python make_speech.py [FOLDER]

in an environment with torch and Transformers. Its method `generate` detects the language, puts the earlier text before
the start, and suppresses tokens. With a FOLDER, the files go there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_encoder_decoders import built
from speech import CASES, CONFIG, GENERATION, POSITIONS, PREVIOUS, RATE, SECONDS, SOUNDS, sound


def main(folder: Path) -> None:
    config = transformers.WhisperConfig(**CONFIG)
    model, state = built("speech", config, {})
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    arrays = {f"{name}/tokens": tokens(model, *case) for name, case in CASES.items()}
    arrays["languages"] = np.array([int(model.detect_language(features_of(number))[0]) for number in range(SOUNDS)])
    shapes = {key: each.shape for key, each in state.items()}
    (folder / "speech.json").write_text(
        json.dumps({"config": config.to_diff_dict(), "shapes": shapes}, indent=1, sort_keys=True) + "\n"
    )
    np.savez_compressed(folder / "speech.npz", **arrays)


def features_of(number: int) -> Any:
    extract = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)
    return extract(sound(number), sampling_rate=RATE, return_tensors="pt")["input_features"]


def tokens(model: Any, number: int, language: str | None, before: str) -> Any:
    """The tokens of a text."""
    features = features_of(number)
    earlier = [PREVIOUS, *f" {before}".encode()] if before else []
    options: dict[str, Any] = {"language": language, "task": "transcribe", "return_timestamps": False}
    if earlier:
        options["prompt_ids"] = torch.tensor(earlier)
    room = POSITIONS - len(earlier) - 4
    with torch.inference_mode():
        found = model.generate(features, max_new_tokens=room, do_sample=False, num_beams=1, **options)[0]
    return found.numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
