"""Files of the decoders in `checkpoints.py`, and what Transformers computes for them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.core.language.checkpoints import CHECKPOINTS, gguf_parts, weight
from tests.core.language.gguf_writer import floats, gguf_bytes

_HERE = Path(__file__).parent
_RECORDED = json.loads((_HERE / "transformers.json").read_text())
EXPECTED = np.load(_HERE / "transformers.npz")
FAMILIES = list(CHECKPOINTS)
# One checkpoint of each family; the other ones are slow tests where a compilation takes a second or more.
_FIRST = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "smollm3")
_SLOW = ("mixtral", "qwen3-moe")  # native code: one mixture of experts is enough
IN_NATIVE_CODE = [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in FAMILIES]
MOSTLY_SLOW = [name if name in _FIRST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def config(name: str) -> dict[str, Any]:
    """The `config.json` that Transformers writes."""
    found: dict[str, Any] = copy.deepcopy(_RECORDED[name]["config"])
    return found


def weights(name: str) -> dict[str, Any]:
    """The tensors of the checkpoint, by Transformers' names."""
    return {key: weight(name, key, tuple(shape)) for key, shape in _RECORDED[name]["shapes"].items()}


def write_folder(folder: Path, name: str) -> Path:
    """A Hugging Face folder of the checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name)))
    save_file(weights(name), folder / "model.safetensors", {"format": "pt"})
    return folder


def gguf_content(name: str) -> bytes:
    """A GGUF file of the checkpoint in float32."""
    metadata, arrays = gguf_parts(config(name), weights(name))
    return gguf_bytes(metadata, {key: floats(array) for key, array in arrays.items()})
