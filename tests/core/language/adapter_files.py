"""Files of seeded LoRA adapters as PEFT writes them, and weights into which they are merged with NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# The layers of the small Llama-like checkpoints: name -> (out, in).
SHAPES = {
    "self_attn.q_proj": (48, 48), "self_attn.v_proj": (24, 48), "self_attn.o_proj": (48, 48),
    "mlp.gate_proj": (72, 48), "mlp.down_proj": (48, 72),
}  # fmt: skip


def factors(seed: int, rank: int, modules: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Factors A and B of each layer, by PEFT's names."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (out, width) in modules.items():
        found[f"base_model.model.{name}.lora_A.weight"] = rng.normal(0, 0.3, (rank, width)).astype(np.float32)
        found[f"base_model.model.{name}.lora_B.weight"] = rng.normal(0, 0.3, (out, rank)).astype(np.float32)
    return found


def llama_factors(seed: int, rank: int, layers: int = 2) -> dict[str, Any]:
    return factors(
        seed, rank, {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in SHAPES.items()}
    )


def write_adapter(folder: Path, tensors: Mapping[str, Any], rank: int, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merged(
    weights: Mapping[str, Any], tensors: Mapping[str, Any], scale: float, transposed: bool = False
) -> dict[str, Any]:
    """The weights W + scale * B A, computed in float64; `transposed` weights are stored [in, out]."""
    found = dict(weights)
    for name, a in tensors.items():
        if "lora_A" in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added = scale * tensors[name.replace("lora_A", "lora_B")].astype(np.float64) @ a
            before = found[f"{module}.weight"]
            found[f"{module}.weight"] = (before + (added.T if transposed else added)).astype(np.float32)
    return found
