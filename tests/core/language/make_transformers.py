"""Makes `transformers.json` and `transformers.npz`: what Transformers computes for the decoders of `checkpoints.py`.

    python make_transformers.py [FOLDER]

in an environment with torch and Transformers, whose code with plain attention (`eager`) and without a cache is the
oracle. With a FOLDER, the files go there. Each GGUF file of the tests is read by Transformers as well: its logits must
be those of the same weights in a Hugging Face folder.
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
from checkpoints import CHECKPOINTS, IDS, IN_GGUF, NEW, PROMPT, RATE, STEPS, gguf_parts, weight
from gguf_writer import floats, gguf_bytes
from safetensors.numpy import load_file, save_file

# Transformers cannot map the GGUF files of these, and of qwen3-moe no layer without experts.
NOT_READ = {"mistral", "mixtral", "qwen3-moe", "smollm3"}


def main(folder: Path) -> None:
    configs: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name in CHECKPOINTS:
        kind, arguments = CHECKPOINTS[name]
        config = getattr(transformers, kind)(**arguments).to_diff_dict()
        model, state = built(name)
        configs[name] = {"config": config, "shapes": {key: each.shape for key, each in state.items()}}
        arrays[f"{name}/logits"] = logits(model, IDS)
        arrays[f"{name}/tokens"] = greedy(model)
        if name in IN_GGUF and name not in NOT_READ:
            check_gguf(name, model, state, arrays[f"{name}/logits"])
        arrays[f"{name}/losses"] = train(model)
    (folder / "transformers.json").write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(folder / "transformers.npz", **arrays)


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """The model of a checkpoint, and its weights by the names that `save_pretrained` writes: tied weights once."""
    kind, arguments = CHECKPOINTS[name]
    config = getattr(transformers, kind)(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {key: array.shape for key, array in load_file(file).items()}
        state = {key: weight(name, key, shape) for key, shape in sorted(shapes.items())}
        save_file(state, file, {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval(), state


def logits(model: Any, ids: Any) -> Any:
    with torch.inference_mode():
        return model(torch.from_numpy(np.asarray(ids)), use_cache=False).logits.numpy()


def greedy(model: Any) -> Any:
    tokens = list(PROMPT)
    for _ in range(NEW):
        tokens.append(int(logits(model, [tokens])[0, -1].argmax()))
    return np.array(tokens)


def train(model: Any) -> Any:
    """The losses of the next token before each update by stochastic gradient descent."""
    optimizer, ids, losses = torch.optim.SGD(model.parameters(), RATE), torch.from_numpy(IDS), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = model(ids, use_cache=False).logits[:, :-1].transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(found, ids[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def check_gguf(name: str, model: Any, state: dict[str, Any], expected: Any) -> None:
    metadata, arrays = gguf_parts(model.config.to_dict(), state)
    with tempfile.TemporaryDirectory() as folder:
        data = gguf_bytes(metadata, {key: floats(array) for key, array in arrays.items()})
        (Path(folder) / "model.gguf").write_bytes(data)
        read = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", config=model.config, attn_implementation="eager", dtype=torch.float32
        )
    np.testing.assert_allclose(logits(read, IDS), expected, 1e-4, 1e-4, err_msg=name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
