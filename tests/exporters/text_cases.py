"""Encoders and decoders of text and speech, of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers_case import BATCH_AND_LENGTH, CASES, SMALL, Axes, Case, add_text, built, text


def mean_pooled(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Sentence embeddings: the mean of the tokens that the mask keeps, of length 1."""
    hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9))


def add_encoders() -> None:
    add_text("bert", hf.BertConfig, hf.BertModel)
    add_text("bert_classifier", hf.BertConfig, hf.BertForSequenceClassification)
    add_text("minilm_pooled", hf.BertConfig, hf.BertModel, mean_pooled)
    add_text("minilm_l6", hf.BertConfig, hf.BertModel, mean_pooled, **MINILM_L6)
    add_text("distilbert", hf.DistilBertConfig, hf.DistilBertModel, dim=64, n_layers=2, n_heads=4, hidden_dim=96)
    add_text("roberta", hf.RobertaConfig, hf.RobertaModel)
    add_text("xlm_roberta", hf.XLMRobertaConfig, hf.XLMRobertaForTokenClassification)
    add_text("albert", hf.AlbertConfig, hf.AlbertModel, embedding_size=32)
    add_text("electra", hf.ElectraConfig, hf.ElectraModel, embedding_size=32)
    add_text("deberta", hf.DebertaConfig, hf.DebertaModel, relative_attention=True, pos_att_type=["p2c", "c2p"])
    add_text(
        "deberta_v2",
        hf.DebertaV2Config,
        hf.DebertaV2Model,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
    )
    add_text("mpnet", hf.MPNetConfig, hf.MPNetModel)
    add_text("modernbert", hf.ModernBertConfig, hf.ModernBertModel, local_attention=8)
    add_text("squeezebert", hf.SqueezeBertConfig, hf.SqueezeBertModel, embedding_size=64)
    add_text(
        "mobilebert",
        hf.MobileBertConfig,
        hf.MobileBertModel,
        embedding_size=32,
        intra_bottleneck_size=32,
        true_hidden_size=32,
    )
    add_text("convbert", hf.ConvBertConfig, hf.ConvBertModel, embedding_size=32)
    add_text("ernie", hf.ErnieConfig, hf.ErnieModel)
    add_text("layoutlm_text", hf.LayoutLMConfig, hf.LayoutLMModel)
    add_text("roformer", hf.RoFormerConfig, hf.RoFormerModel, embedding_size=64)
    add_text("nystromformer", hf.NystromformerConfig, hf.NystromformerModel, num_landmarks=64, segment_means_seq_len=64)
    add_text("fnet", hf.FNetConfig, hf.FNetModel, lambda model, input_ids, attention_mask: model(input_ids))
    add_text("xlnet", hf.XLNetConfig, hf.XLNetModel, d_model=64, n_layer=2, n_head=4, d_inner=96)
    add_text("t5_encoder", hf.T5Config, hf.T5EncoderModel, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    add_text("clip_text", hf.CLIPTextConfig, hf.CLIPTextModel)


# Written only if the command names them: `python -m loadtest packing --model FOLDER/minilm_l6.dynamo/model.onnx`,
# `python -m loadtest cold FOLDER/llama_past_deep.torchscript`.
LARGE = frozenset({"minilm_l6", "llama_past_deep"})
DEEP = {"num_hidden_layers": 34, "num_key_value_heads": 4}
MINILM_L6 = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}


# -- decoders ----------------------------------------------------------------------------------------------------------


def logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def add_decoders() -> None:
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4}
    add_text("gpt2", hf.GPT2Config, hf.GPT2LMHeadModel, logits, **gpt2, n_positions=64)
    add_text("llama", hf.LlamaConfig, hf.LlamaForCausalLM, logits, num_key_value_heads=2)
    add_text("qwen2", hf.Qwen2Config, hf.Qwen2ForCausalLM, logits, num_key_value_heads=2)
    add_text("qwen3", hf.Qwen3Config, hf.Qwen3ForCausalLM, logits, num_key_value_heads=2, head_dim=16)
    add_text("mistral", hf.MistralConfig, hf.MistralForCausalLM, logits, num_key_value_heads=2, sliding_window=8)
    add_text("gemma", hf.GemmaConfig, hf.GemmaForCausalLM, logits, num_key_value_heads=1, head_dim=16)
    add_text(
        "gemma2", hf.Gemma2Config, hf.Gemma2ForCausalLM, logits, num_key_value_heads=2, head_dim=16, sliding_window=8
    )
    add_text("phi", hf.PhiConfig, hf.PhiForCausalLM, logits)
    add_text("opt", hf.OPTConfig, hf.OPTForCausalLM, logits, ffn_dim=96, word_embed_proj_dim=64)
    add_text("gpt_neox", hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, logits)
    add_text("bloom", hf.BloomConfig, hf.BloomForCausalLM, logits, n_layer=2, n_head=4)
    add_text("falcon", hf.FalconConfig, hf.FalconForCausalLM, logits, multi_query=True)
    add_text("olmo2", hf.Olmo2Config, hf.Olmo2ForCausalLM, logits)
    add_past("llama_past", hf.LlamaConfig, hf.LlamaForCausalLM, num_key_value_heads=4)
    add_past("llama_past_deep", hf.LlamaConfig, hf.LlamaForCausalLM, **DEEP)
    add_past("gpt2_past", hf.GPT2Config, hf.GPT2LMHeadModel, **gpt2, n_positions=1024)
    add_past("qwen2_past", hf.Qwen2Config, hf.Qwen2ForCausalLM, num_key_value_heads=2)


# -- mixtures of experts -----------------------------------------------------------------------------------------------


def each_expert(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The sum of the experts' results, computed one expert after the other as in Transformers before version 5.

    Each expert gathers the tokens that chose it, and its results are added at their positions."""
    result = torch.zeros_like(hidden)
    masks = nn.functional.one_hot(chosen, experts.num_experts).permute(2, 1, 0)
    for number in range(experts.num_experts):
        place, token = torch.where(masks[number])
        gated = experts._apply_gate(nn.functional.linear(hidden[token], experts.gate_up_proj[number]))
        made = nn.functional.linear(gated, experts.down_proj[number])
        result.index_add_(0, token, made * weights[token, place, None])
    return result


def each_switch_expert(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As `each_expert`, for Switch Transformers, whose experts are modules."""
    result = torch.zeros_like(hidden)
    masks = chosen.permute(2, 1, 0)
    for number in range(experts.num_experts):
        place, token = torch.where(masks[number])
        made = experts[f"expert_{number}"](hidden[token])
        result.index_add_(0, token, made * weights[token, place, None])
    return result


def add_experts() -> None:
    """Mixtures of experts: a batch of products with each token's experts (`_batched`), or expert by expert (`_each`).

    Transformers' default sorts tokens by experts with `histc`, which no exporter supports."""
    hf.integrations.moe.ALL_EXPERTS_FUNCTIONS.register("each", each_expert)
    few = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    for name, kind in (("batched", "batched_mm"), ("each", "each")):
        chosen = {"experts_implementation": kind, **few}
        add_text(f"mixtral_{name}", hf.MixtralConfig, hf.MixtralForCausalLM, logits, num_local_experts=4, **chosen)
        add_text(f"olmoe_{name}", hf.OlmoeConfig, hf.OlmoeForCausalLM, logits, num_experts=8, **chosen)
        add_text(
            f"qwen2_moe_{name}",
            hf.Qwen2MoeConfig,
            hf.Qwen2MoeForCausalLM,
            logits,
            num_experts=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            **chosen,
        )
    hf.models.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts.forward = each_switch_expert
    add_text(
        "switch_each",
        hf.SwitchTransformersConfig,
        hf.SwitchTransformersEncoderModel,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=2,
        expert_capacity=8,
    )


def add_past(name: str, config: Any, model: Any, **sizes: Any) -> None:
    """A decoder whose inputs are keys and values of past tokens, and whose outputs also have those of new tokens."""
    sizes = {**SMALL, "max_position_embeddings": 1024, **sizes, "attn_implementation": "eager"}
    layers = range(sizes["num_hidden_layers"])
    heads = sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    names = [f"past_key_values.{layer}.{part}" for layer in layers for part in ("key", "value")]
    axes: dict[str, Axes] = {"input_ids": BATCH_AND_LENGTH, "attention_mask": {0: "batch", 1: "total"}}
    axes |= {each: {0: "batch", 2: "past"} for each in names}

    def inputs(batch: int, past: int) -> dict[str, Tensor]:
        new = 3 if past == 12 else 1
        given = {
            "input_ids": torch.randint(3, 90, (batch, new)),
            "attention_mask": torch.ones(batch, past + new).long(),
        }
        return given | {each: torch.randn(batch, heads, past, width) for each in names}

    def forward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, **past: Tensor) -> list[Tensor]:
        cache = hf.DynamicCache(config=model.config)
        for layer in layers:
            cache.update(past[names[2 * layer]], past[names[2 * layer + 1]], layer)
        result = model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        after = result.past_key_values.layers
        return [result.logits, *(tensor for layer in layers for tensor in (after[layer].keys, after[layer].values))]

    CASES[name] = Case(
        partial(built, model, config, sizes),
        inputs,
        axes,
        sizes=((1, 7), (3, 12), (2, 5), (8, 21)),
        lengths=((1, 8), (1, 9), (1, 10), (8, 22)),
        forward=forward,
        example=(2, 12),  # exporters treat a size of 1 as a constant
    )


# -- encoders with decoders --------------------------------------------------------------------------------------------


def add_decoder(name: str, build: Callable[[], nn.Module], width: int = 64) -> None:
    """The decoder of an encoder-decoder: its inputs are token ids and the encoder's output."""

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        given = text(batch, length + 2)
        hidden = torch.randn(batch, length + 2, width)
        ids = torch.randint(3, 90, (batch, length))
        return {
            "decoder_input_ids": ids,
            "encoder_hidden_states": hidden,
            "encoder_attention_mask": given["attention_mask"],
        }

    def forward(
        model: Any, decoder_input_ids: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor
    ) -> Any:
        return model.get_decoder()(
            input_ids=decoder_input_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=False,
        ).last_hidden_state

    axes = {
        "decoder_input_ids": BATCH_AND_LENGTH,
        "encoder_hidden_states": {0: "batch", 1: "encoded"},
        "encoder_attention_mask": {0: "batch", 1: "encoded"},
    }
    CASES[name] = Case(build, inputs, axes, forward=forward)


def add_encoder_decoders() -> None:
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    bart = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "vocab_size": 100,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    add_decoder("t5_decoder", lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)))
    add_decoder("bart_decoder", lambda: hf.BartForConditionalGeneration(hf.BartConfig(**bart)))
    add_decoder("marian_decoder", lambda: hf.MarianMTModel(hf.MarianConfig(**bart)))
    add_decoder("m2m100_decoder", lambda: hf.M2M100ForConditionalGeneration(hf.M2M100Config(**bart)))
    whisper = {**bart, "max_target_positions": 64, "max_source_positions": 40, "num_mel_bins": 16}
    del whisper["max_position_embeddings"]

    def whole(model: nn.Module, input_features: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return model(input_features=input_features, decoder_input_ids=decoder_input_ids, use_cache=False).logits

    def heard(batch: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 90, (batch, length))
        return {"input_features": torch.randn(batch, 16, 80), "decoder_input_ids": ids}

    axes = {"input_features": {0: "batch"}, "decoder_input_ids": BATCH_AND_LENGTH}
    CASES["whisper"] = Case(
        lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**whisper)), heard, axes, forward=whole
    )
    CASES["bart"] = Case(
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**bart)),
        lambda batch, length: text(batch, length) | {"decoder_input_ids": torch.randint(3, 90, (batch, length))},
        {
            "input_ids": BATCH_AND_LENGTH,
            "attention_mask": BATCH_AND_LENGTH,
            "decoder_input_ids": {0: "batch", 1: "decoded"},
        },
        forward=lambda model, **given: model(**given, use_cache=False).logits,
    )


def add_all() -> None:
    add_encoders()
    add_decoders()
    add_experts()
    add_encoder_decoders()
