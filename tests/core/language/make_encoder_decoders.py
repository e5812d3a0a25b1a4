"""Makes `encoder_decoders.json` and `encoder_decoders.npz`: what Transformers computes for `encoder_decoders.py`.

    python make_encoder_decoders.py [FOLDER]

in an environment with torch and Transformers, whose code with plain attention (`eager`) and without a cache is the
oracle. With a FOLDER, the files go there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import weight
from encoder_decoders import BANDS, BEGIN, CHECKPOINTS, EVERY, NEW, RATE, STEPS, TARGET, sound, source
from safetensors.numpy import load_file, save_file
from transformers.models.t5.modeling_t5 import T5Attention

BUCKETS = ((32, 128), (16, 20), (64, 200))  # and the greatest distance


def main(folder: Path) -> None:
    recorded: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name in CHECKPOINTS:
        kind, arguments, more = CHECKPOINTS[name]
        config = getattr(transformers, kind)(**arguments)
        model, state = built(name, config, more)
        recorded[name] = {"config": config.to_diff_dict(), "shapes": {key: each.shape for key, each in state.items()}}
        label, given = source(name)
        arrays[f"{name}/logits"] = logits(model, label, given, TARGET)
        arrays[f"{name}/tokens"] = greedy(model, label, given[:1], [model.config.decoder_start_token_id])
        if label == "input_features":
            arrays[f"{name}/prompted"] = greedy(model, label, given[1:], list(BEGIN))
        arrays[f"{name}/losses"] = train(model, label, given)
    for bands in BANDS:
        extract = transformers.WhisperFeatureExtractor(feature_size=bands)
        features = extract(sound(), sampling_rate=16_000, return_tensors="np")["input_features"][0]
        arrays[f"sound/{bands}"] = features[:, ::EVERY]
    for buckets, distance in BUCKETS:
        difference = torch.arange(-distance - 5, distance + 6)
        for both_ways in (False, True):
            found = T5Attention._relative_position_bucket(difference, both_ways, buckets, distance)
            arrays[f"buckets/{buckets}/{distance}/{int(both_ways)}"] = found.numpy()
    (folder / "encoder_decoders.json").write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(folder / "encoder_decoders.npz", **arrays)


def built(name: str, config: Any, more: dict[str, tuple[int, ...]]) -> tuple[Any, dict[str, Any]]:
    """The model of a checkpoint, and the weights of its folder, `more` among them."""
    kind = getattr(transformers, config.__class__.__name__.replace("Config", "ForConditionalGeneration"))
    with tempfile.TemporaryDirectory() as folder:
        kind(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {key: array.shape for key, array in load_file(file).items()} | more
        state = {key: weight(name, key, shape) for key, shape in sorted(shapes.items())}
        save_file(state, file, {"format": "pt"})
        model = kind.from_pretrained(folder, config=config, attn_implementation="eager", dtype=torch.float32)
    for key in more:
        assert np.array_equal(model.state_dict()[key].numpy(), state[key]), f"{key} was not read"
    return model.eval(), state


def logits(model: Any, label: str, given: Any, target: Any) -> Any:
    inputs = {label: torch.from_numpy(given), "decoder_input_ids": torch.from_numpy(np.asarray(target))}
    with torch.inference_mode():
        return model(**inputs, use_cache=False).logits.numpy()


def greedy(model: Any, label: str, given: Any, tokens: list[int]) -> Any:
    for _ in range(NEW):
        tokens.append(int(logits(model, label, given, [tokens])[0, -1].argmax()))
    return np.array(tokens)


def train(model: Any, label: str, given: Any) -> Any:
    """The losses of the next token before each update by stochastic gradient descent.

    The encoder's positions of Whisper are constant, as in the paper.
    """
    if label == "input_features":
        model.model.encoder.embed_positions.requires_grad_(False)
    optimizer, target, losses = torch.optim.SGD(model.parameters(), RATE), torch.from_numpy(TARGET), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = {label: torch.from_numpy(given), "decoder_input_ids": target}
        found = model(**inputs, use_cache=False).logits[:, :-1].transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(found, target[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
