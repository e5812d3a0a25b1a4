"""What Transformers computes with the weights of a GGUF file, which the package `gguf` reads.

    python make_language_models.py FILE.gguf PROMPTS.json OUT.npz

PROMPTS.json has a list of lists of token ids. OUT.npz has `tokens` [prompts, NEW], the greedy tokens after each prompt,
and `gaps` of the same shape, the differences of the two best logits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

NEW = 256
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip


def main(file: str, prompts: str, out: str) -> None:
    model = llama(gguf.GGUFReader(file))
    with open(prompts) as source:
        found = [greedy(model, ids) for ids in json.load(source)]
    np.savez(out, tokens=[tokens for tokens, _ in found], gaps=[gaps for _, gaps in found])


def llama(reader: Any) -> Any:
    """The model in a GGUF file of the architecture llama, in float32."""

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, shared = field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
    )
    state = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, count in (("attn_q.", heads), ("attn_k.", shared)):
            if part in tensor.name:  # llama.cpp's converter interleaves the halves of rotary heads
                array = array.reshape(count, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        state[renamed(tensor.name)] = torch.from_numpy(np.ascontiguousarray(array))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    return model


def renamed(name: str) -> str:
    *layer, part, kind = name.removeprefix("blk.").split(".")
    return f"model.layers.{layer[0]}.{NAMES[part]}.{kind}" if layer else f"{NAMES[part]}.{kind}"


def greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """The tokens after a prompt, without an early end, and the differences of the two best logits."""
    tokens: list[int] = []
    gaps: list[float] = []
    fed, past = torch.tensor([ids]), None
    with torch.inference_mode():
        for _ in range(NEW):
            result = model(fed, past_key_values=past, use_cache=True)
            best = result.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            fed, past = best.indices[None, :1], result.past_key_values
    return tokens, gaps


if __name__ == "__main__":
    main(*sys.argv[1:])
