"""Settings and weights of decoders in a GGUF file, by the names of llama.cpp (`gguf-py/gguf/constants.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.language.document import MOST_LAYERS, Document
from lathe.core.language.gguf import GgufFile
from lathe.core.language.settings import DecoderSettings, DividedFrequencies, Experts, LinearScaling, Rotary, Scaling
from lathe.core.language.weight_sources import WeightSource, joined_halves, joined_rows, part

UNUSED = re.compile(r"rope_freqs\.weight|output\.weight")  # the second is a copy where weights are tied

_NAMES = {
    "embed_tokens": "token_embd", "embed_positions": "position_embd", "norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_EXPERT_NAMES = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_JOINED = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}  # in `attn_qkv` of GPT-2
FAMILIES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gpt2", "smollm3")
_ADJACENT = ("llama", "smollm3")  # llama.cpp rotates adjacent elements, and reorders rows for that
_UNROTATED_EVERY = {"smollm3": 4}  # llama.cpp rotates no head in every 4th layer; the file does not say it


def read_settings(file: GgufFile) -> DecoderSettings:
    """The settings in the metadata of a GGUF file, and in the names of its tensors.

    UnsupportedError for another architecture, and for settings that the decoder lacks. ModelError for a field that is
    missing or has no possible value.
    """
    family = Document(file.name, file.metadata).choice("general.architecture", FAMILIES)
    fields = Document(file.name, file.metadata, f"{family}.")
    heads, width = fields.size("attention.head_count"), fields.size("embedding_length")
    size = fields.size("attention.key_length", max(width // heads, 1))
    if fields.size("attention.value_length", size) != size:
        raise UnsupportedError("expected keys and values of the same size", where=file.name)
    gpt2 = family == "gpt2"
    window = fields.size("attention.sliding_window") if fields.get("attention.sliding_window") else None
    layers = fields.size("block_count", most=MOST_LAYERS)
    experts = _experts(file, fields, family, layers) if fields.get("expert_count") else None
    return DecoderSettings(
        family=family,
        vocabulary=_vocabulary(file),
        width=width,
        heads=heads,
        kv_heads=fields.size("attention.head_count_kv", heads),
        head_size=size,
        feedforward=fields.size("feed_forward_length", experts.width if experts is not None else None),
        context=fields.size("context_length"),
        windows=(window,) * layers,
        epsilon=fields.number(f"attention.layer_norm_{'' if gpt2 else 'rms_'}epsilon"),
        activation="gelu_new" if gpt2 else "silu",
        rotary=None if gpt2 else _rotary(file, fields, size),
        normalization="layer" if gpt2 else "rms",
        gated=not gpt2,
        tied="output.weight" not in file.tensors,
        query_norm=family in ("qwen3", "qwen3moe"),
        query_bias=gpt2 or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        feedforward_bias="blk.0.ffn_up.bias" in file.tensors,
        experts=experts,
        unrotated=frozenset(range(every - 1, layers, every) if (every := _UNROTATED_EVERY.get(family)) else ()),
    )


def _experts(file: GgufFile, fields: Document, family: str, layers: int) -> Experts:
    """The experts, in the layers that have a router. llama.cpp normalizes the shares of all families but Qwen2-MoE."""
    names = (f"blk.{layer}.ffn_up_shexp.weight" for layer in range(layers))
    shared = next((file.tensors[name].shape for name in names if name in file.tensors), None)
    return Experts(
        count=fields.size("expert_count"),
        chosen=fields.size("expert_used_count"),
        width=fields.size("expert_feed_forward_length", fields.get("feed_forward_length")),
        normalized=family != "qwen2moe",
        shared=shared[0] if shared else None,
        layers=tuple(f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(layers)),
    )


def weight_source(settings: DecoderSettings) -> Callable[[str], WeightSource]:
    """The function from the path of a parameter to its source."""

    def source(path: str) -> WeightSource:
        if path == "lm_head.weight":
            return WeightSource("output.weight")
        found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+_proj)", path)
        if found is not None:
            names = [f"blk.{found[1]}.{name}.weight" for name in _EXPERT_NAMES[found[2]]]
            return WeightSource(names[0], joined_rows, tuple(names[1:]))
        found = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", path)
        assert found is not None, path
        layer, module, kind = found.groups()
        begin = "" if layer is None else f"blk.{layer}."
        if settings.family == "gpt2" and module in _JOINED:
            return WeightSource(f"{begin}attn_qkv.{kind}", part(_JOINED[module], 3))
        name = f"{begin}{_NAMES[module]}.{kind}"
        if module == "mlp.shared_expert_gate":
            return WeightSource(name, lambda array: array.reshape(1, -1))
        heads = {"self_attn.q_proj": settings.heads, "self_attn.k_proj": settings.kv_heads}.get(module)
        if settings.family in _ADJACENT and heads is not None:
            return WeightSource(name, joined_halves(heads))
        return WeightSource(name)

    return source


def _vocabulary(file: GgufFile) -> int:
    """The number of rows of the embedding. ModelError if the file has none."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or not embedding.shape[0]:
        raise ModelError("expected a tensor 'token_embd.weight' of [tokens, width]", where=file.name)
    return embedding.shape[0]


def _rotary(file: GgufFile, fields: Document, size: int) -> Rotary:
    rotated = fields.size("rope.dimension_count", size)
    if rotated != size:
        raise UnsupportedError(
            f"expected that all {size} elements of a head are rotated, got {rotated}", where=file.name
        )
    return Rotary(fields.number("rope.freq_base", 10_000.0), _scaling(file, fields))


def _scaling(file: GgufFile, fields: Document) -> Scaling | None:
    """The scaling of rotary frequencies: factors in the tensor `rope_freqs.weight`, or one factor in the metadata."""
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        numbers = factors.array().astype(np.float64).ravel()
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise ModelError("tensor 'rope_freqs.weight': expected positive numbers", where=file.name)
        return DividedFrequencies(tuple(numbers.tolist()))
    if fields.choice("rope.scaling.type", ("none", "linear"), "none") == "linear":
        return LinearScaling(fields.number("rope.scaling.factor"))
    return None
