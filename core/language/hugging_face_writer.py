"""Writes a decoder as a Hugging Face folder: `config.json`, `model.safetensors` and the files of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.language.hugging_face import FAMILIES, weight_source
from lathe.core.language.settings import DecoderSettings, LinearScaling, Llama3Scaling, Rotary, Scaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel",
}  # fmt: skip


def config_of(settings: DecoderSettings) -> dict[str, Any]:
    """The fields of `config.json` from which `hugging_face.read_settings` reads these settings.

    UnsupportedError for a family or setting that a `config.json` of the family cannot express.
    """
    if settings.family not in FAMILIES or settings.family not in _ARCHITECTURES:
        raise UnsupportedError(f"family '{settings.family}' cannot be written as a Hugging Face folder")
    common = {
        "architectures": [_ARCHITECTURES[settings.family]],
        "model_type": settings.family,
        "vocab_size": settings.vocabulary,
        "tie_word_embeddings": settings.tied,
        "torch_dtype": "float32",
    }
    return common | (_gpt2_fields(settings) if settings.family == "gpt2" else _llama_fields(settings))


def _gpt2_fields(settings: DecoderSettings) -> dict[str, Any]:
    return {
        "n_embd": settings.width,
        "n_head": settings.heads,
        "n_layer": settings.layers,
        "n_inner": settings.feedforward,
        "n_positions": settings.context,
        "layer_norm_epsilon": settings.epsilon,
        "activation_function": settings.activation,
    }


def _llama_fields(settings: DecoderSettings) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "hidden_size": settings.width,
        "intermediate_size": settings.feedforward,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_size,
        "max_position_embeddings": settings.context,
        "rms_norm_eps": settings.epsilon,
        "hidden_act": settings.activation,
    }
    rotary = settings.rotary or Rotary(10_000.0)
    fields |= {"rope_theta": rotary.theta, "rope_scaling": _scaling_fields(rotary.scaling)}
    if settings.family in ("llama", "qwen3"):
        fields["attention_bias"] = settings.output_bias
    if settings.family == "llama":
        fields["mlp_bias"] = settings.feedforward_bias
    return fields | _window_fields(settings)


def _scaling_fields(scaling: Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, length):
            numbers = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": length}
            return {"rope_type": "llama3", "factor": factor, **numbers}
    raise UnsupportedError("rotary scaling by a factor for each frequency cannot be written to config.json")


def _window_fields(settings: DecoderSettings) -> dict[str, Any]:
    window = next((each for each in settings.windows if each is not None), None)
    if settings.family == "mistral":
        return {"sliding_window": window}
    if settings.family == "llama" or window is None:
        return {}
    types = ["full_attention" if each is None else "sliding_attention" for each in settings.windows]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": types}


def checkpoint_of(settings: DecoderSettings, weights: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of `model.safetensors` by name, from the decoder's parameters by path."""
    if settings.family != "gpt2":
        return dict(weights)
    parts: dict[str, list[Array]] = {}
    for path, array in weights.items():  # queries, keys and values come in this order, and form one tensor
        parts.setdefault(weight_source(settings, ["transformer."])(path).name, []).append(array)
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return {name: array.T if _is_transposed(name, array) else array for name, array in joined.items()}


def _is_transposed(name: str, array: Array) -> bool:
    """GPT-2 stores the weights of its layers [inputs, outputs]."""
    return array.ndim == 2 and ".c_" in name


def safetensors_bytes(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file of float32 tensors (https://github.com/huggingface/safetensors, section "Format")."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Transformers refuses a file without it
    contents, end = [], 0
    for name, array in sorted(tensors.items()):
        contents.append(np.ascontiguousarray(array, np.float32).tobytes())
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + len(contents[-1])]}
        end += len(contents[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text + b"".join(contents)
