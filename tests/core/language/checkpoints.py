"""Small seeded decoders of each family: settings by Transformers' names, weights, and GGUF files of the same weights.

Scripts of other environments import this file: it needs NumPy alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

VOCABULARY = 97
IDS = np.random.default_rng(5).integers(0, VOCABULARY, (2, 21))
PROMPT, NEW = (3, 60, 7, 42, 11), 64  # a prompt, and the number of greedy tokens after it

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": None,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": None}

# Name -> the class of the configuration in Transformers, and its arguments.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SMALL, "rms_norm_eps": 1e-5}),
    "llama-tied": ("LlamaConfig", {**_SMALL, "tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama-biased": ("LlamaConfig", {
        **_SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 16,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    }),
    "mistral": ("MistralConfig", {**_SMALL, "sliding_window": 8, "head_dim": 10}),
    "qwen2": ("Qwen2Config", {**_SMALL, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {
        **_SMALL, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    }),
    "qwen3": ("Qwen3Config", {**_SMALL, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**_SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", {
        **_SMALL, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    }),
    "qwen3-moe": ("Qwen3MoeConfig", {
        **_SMALL, "head_dim": 16, "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "mlp_only_layers": [0],
    }),
    "smollm3": ("SmolLM3Config", {**_SMALL, "num_hidden_layers": 4, "pad_token_id": None, "bos_token_id": None}),
    "smollm3-window": ("SmolLM3Config", {
        **_SMALL, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 6, "pad_token_id": None,
        "bos_token_id": None,
    }),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt2-wide": ("GPT2Config", {**_GPT2, "n_inner": 80, "activation_function": "gelu"}),
}  # fmt: skip

# GGUF files cannot say that some layers have a window and others none, or that the activation of GPT-2 is another.
IN_GGUF = [name for name in CHECKPOINTS if name not in ("qwen2-window", "smollm3-window", "gpt2-wide")]

STEPS, RATE = 4, 0.05  # of training by stochastic gradient descent on IDS


def weight(name: str, tensor: str, shape: tuple[int, ...]) -> Any:
    """The elements of a tensor of a checkpoint: normalizations are near 1, so that each layer matters."""
    rng = np.random.default_rng(zlib.crc32(f"{name}/{tensor}".encode()))
    array = rng.normal(0, 0.25, shape).astype(np.float32)
    is_scale = ("norm" in tensor or "ln_" in tensor) and tensor.endswith("weight")
    return array + np.float32(1) if is_scale else array


_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


def gguf_parts(config: Mapping[str, Any], weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and arrays of a GGUF file, by the names of llama.cpp, from those of Transformers."""
    family = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    if family == "gpt2":
        return _gpt2_metadata(config), {_name(tensor): _gpt2_array(tensor, array) for tensor, array in weights.items()}
    rope = config["rope_parameters"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    metadata: dict[str, Any] = {
        "general.architecture": ("str", family),
        f"{family}.block_count": ("u32", config["num_hidden_layers"]),
        f"{family}.context_length": ("u32", config["max_position_embeddings"]),
        f"{family}.embedding_length": ("u32", config["hidden_size"]),
        f"{family}.feed_forward_length": ("u32", config["intermediate_size"]),
        f"{family}.attention.head_count": ("u32", config["num_attention_heads"]),
        f"{family}.attention.head_count_kv": ("u32", config["num_key_value_heads"]),
        f"{family}.attention.layer_norm_rms_epsilon": ("f32", config["rms_norm_eps"]),
        f"{family}.attention.key_length": ("u32", size),
        f"{family}.attention.value_length": ("u32", size),
        f"{family}.rope.freq_base": ("f32", rope["rope_theta"]),
        f"{family}.rope.dimension_count": ("u32", size),
        f"{family}.vocab_size": ("u32", config["vocab_size"]),
    }
    if rope["rope_type"] == "linear":
        metadata[f"{family}.rope.scaling.type"] = ("str", "linear")
        metadata[f"{family}.rope.scaling.factor"] = ("f32", rope["factor"])
    if config.get("sliding_window") and config["model_type"] == "mistral":
        metadata[f"{family}.attention.sliding_window"] = ("u32", config["sliding_window"])
    metadata |= _expert_metadata(config, family)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    arrays = {"rope_freqs.weight": _llama3_factors(rope, size)} if rope["rope_type"] == "llama3" else {}
    for tensor, array in _stacked_experts(weights).items():
        count = next((count for part, count in heads.items() if part in tensor), None)
        arrays[_name(tensor)] = (
            array if count is None or family not in ("llama", "smollm3") else _interleaved(array, count)
        )
    return metadata, arrays


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps", "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip


def _expert_metadata(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    if "num_experts_per_tok" not in config:
        return {}
    found = {
        f"{family}.expert_count": (
            "u32",
            config["num_local_experts" if "num_local_experts" in config else "num_experts"],
        ),
        f"{family}.expert_used_count": ("u32", config["num_experts_per_tok"]),
    }
    if "moe_intermediate_size" in config:
        found[f"{family}.expert_feed_forward_length"] = ("u32", config["moe_intermediate_size"])
    return found


def _stacked_experts(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The matrices of all experts as one tensor, in the order of their numbers; a row of a shared gate as a vector."""
    groups: dict[str, dict[int, Any]] = {}
    found = {}
    for tensor, array in weights.items():
        before, experts, after = tensor.partition(".experts.")
        if experts:
            number, _, rest = after.partition(".")
            groups.setdefault(f"{before}.experts.{rest}", {})[int(number)] = array
        else:
            found[tensor] = array[0] if tensor.endswith("shared_expert_gate.weight") else array
    return found | {name: np.stack([group[i] for i in range(len(group))]) for name, group in groups.items()}


def _name(tensor: str) -> str:
    module, _, kind = tensor.rpartition(".")
    for prefix in ("model.layers.", "transformer.h."):
        if module.startswith(prefix):
            layer, _, inner = module.removeprefix(prefix).partition(".")
            return f"blk.{layer}.{_NAMES[inner]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def _gpt2_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "general.architecture": ("str", "gpt2"),
        "gpt2.block_count": ("u32", config["n_layer"]),
        "gpt2.context_length": ("u32", config["n_positions"]),
        "gpt2.embedding_length": ("u32", config["n_embd"]),
        "gpt2.feed_forward_length": ("u32", config.get("n_inner") or 4 * config["n_embd"]),
        "gpt2.attention.head_count": ("u32", config["n_head"]),
        "gpt2.attention.layer_norm_epsilon": ("f32", config["layer_norm_epsilon"]),
    }


def _gpt2_array(tensor: str, array: Any) -> Any:
    return array.T if ".c_" in tensor and tensor.endswith("weight") else array


def _llama3_factors(rope: Mapping[str, Any], size: int) -> Any:
    """What divides each frequency, as `generate_extra_tensors` of llama.cpp's converter computes it."""
    factors = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / size)
        length = rope["original_max_position_embeddings"]
        if wavelength < length / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > length / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            between = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (length / wavelength - rope["low_freq_factor"]) / between
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _interleaved(array: Any, heads: int) -> Any:
    """Rows of rotary heads in llama.cpp's order, as `LlamaModel.permute` of its converter makes it."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
