"""Writes models of Transformers and torchvision through both exporters of PyTorch; for an interpreter that has these.

    python make_transformers.py FOLDER [NAME ...]

writes FOLDER/<name>.<exporter>/{model.onnx, feeds-<i>.npz, outputs-<i>.npz}.

Weights are random, sizes are small. Outputs are PyTorch's own. `dynamo` leaves each free dimension without a name
(`Dim.DYNAMIC`), `torchscript` names them: so people export them.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

# torchvision's own operators are not in the wheel for CPUs; it cannot be imported without their declarations.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402
import transformers as hf  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Sizes = tuple[int, int]  # batch size, length of sequences
Axes = Mapping[int, str]  # the free axes of an input, with the names that `torchscript` gives them

BATCH_AND_LENGTH: Axes = {0: "batch", 1: "length"}


@dataclass
class Case:
    """A model to export. `inputs` makes its inputs for a batch size and a length; `sizes` are those to compare on."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    axes: Mapping[str, Axes]
    sizes: Sequence[Sizes] = ((1, 7), (3, 12), (8, 16))
    forward: Callable[..., Any] | None = None  # default: the model itself
    example: Sizes = (2, 9)
    exporters: Sequence[str] = ("dynamo", "torchscript")


CASES: dict[str, Case] = {}


class Exported(nn.Module):
    """A model whose outputs are plain tensors."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.model, self.names, self.call = model, list(case.axes), case.forward

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, tensors, strict=True))
        return tuple(_tensors(self.call(self.model, **given) if self.call else self.model(**given)))


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, without those that only repeat hidden layers."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = [value for name, value in result.items() if name not in ("past_key_values", "hidden_states")]
    return [tensor for item in result or () if item is not None for tensor in _tensors(item)]


# -- inputs ------------------------------------------------------------------------------------------------------------


def text(batch: int, length: int, names: tuple[str, str] = ("input_ids", "attention_mask")) -> dict[str, Tensor]:
    """Token ids, and a mask that shortens every row but the first by its own number of tokens."""
    ids = torch.randint(3, 90, (batch, length))
    lengths = torch.tensor([max(1, length - row % length) for row in range(batch)])
    return {names[0]: ids, names[1]: (torch.arange(length)[None] < lengths[:, None]).to(torch.int64)}


def images(size: int, name: str = "pixel_values") -> Callable[[int, int], dict[str, Tensor]]:
    return lambda batch, length: {name: torch.randn(batch, 3, size, size)}


def built(model: Any, config: Any, sizes: Mapping[str, Any]) -> nn.Module:
    """A model of a configuration."""
    made: nn.Module = model(config(**sizes))
    return made


def add_text(name: str, config: Any, model: Any, forward: Callable[..., Any] | None = None, **sizes: Any) -> None:
    """A model that reads token ids and a mask."""
    axes = {"input_ids": BATCH_AND_LENGTH, "attention_mask": BATCH_AND_LENGTH}
    CASES[name] = Case(partial(built, model, config, {**SMALL, **sizes}), text, axes, forward=forward)


def add_images(name: str, build: Callable[[], nn.Module], size: int = 32, input_name: str = "pixel_values") -> None:
    """A model that reads images of a fixed size."""
    CASES[name] = Case(build, images(size, input_name), {input_name: {0: "batch"}}, sizes=((1, 0), (3, 0), (8, 0)))


# -- text encoders -----------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


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


# Made only where they are named: `python -m loadtest packing --model FOLDER/minilm_l6.dynamo/model.onnx`.
LARGE = frozenset({"minilm_l6"})
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
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    add_text("gpt2", hf.GPT2Config, hf.GPT2LMHeadModel, logits, **gpt2)
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
    add_text(
        "qwen2_moe",
        hf.Qwen2MoeConfig,
        hf.Qwen2MoeForCausalLM,
        logits,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    for name, config, model in (
        ("llama_past", hf.LlamaConfig, hf.LlamaForCausalLM),
        ("gpt2_past", hf.GPT2Config, hf.GPT2LMHeadModel),
    ):
        add_past(name, config, model, **(gpt2 if name == "gpt2_past" else {"num_key_value_heads": 4}))


def add_past(name: str, config: Any, model: Any, **sizes: Any) -> None:
    """A decoder that takes the keys and values of the tokens before, and gives them with those of the new tokens."""
    layers = range(2)
    names = [f"past_key_values.{layer}.{part}" for layer in layers for part in ("key", "value")]
    axes: dict[str, Axes] = {"input_ids": BATCH_AND_LENGTH, "attention_mask": {0: "batch", 1: "total"}}
    axes |= {each: {0: "batch", 2: "past"} for each in names}

    def inputs(batch: int, past: int) -> dict[str, Tensor]:
        new = 1 if past % 2 else 3
        given = {
            "input_ids": torch.randint(3, 90, (batch, new)),
            "attention_mask": torch.ones(batch, past + new).long(),
        }
        return given | {each: torch.randn(batch, 4, past, 16) for each in names}

    def forward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, **past: Tensor) -> list[Tensor]:
        cache = hf.DynamicCache(config=model.config)
        for layer in layers:
            cache.update(past[names[2 * layer]], past[names[2 * layer + 1]], layer)
        result = model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        after = result.past_key_values.layers
        return [result.logits, *(tensor for layer in layers for tensor in (after[layer].keys, after[layer].values))]

    CASES[name] = Case(
        partial(built, model, config, {**SMALL, **sizes, "attn_implementation": "eager"}),
        inputs,
        axes,
        sizes=((1, 7), (3, 12), (2, 5)),
        forward=forward,
    )


# -- encoders with decoders --------------------------------------------------------------------------------------------


def add_decoder(name: str, build: Callable[[], nn.Module], width: int = 64) -> None:
    """The decoder of an encoder-decoder: token ids, and what the encoder gave."""

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


# -- images, sound, several kinds --------------------------------------------------------------------------------------


VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}


def add_vision() -> None:
    stages = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
    window = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    add_images("vit", lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)))
    add_images("deit", lambda: hf.DeiTModel(hf.DeiTConfig(**VIT)))
    add_images("beit", lambda: hf.BeitModel(hf.BeitConfig(**VIT, use_relative_position_bias=True)))
    add_images("dinov2", lambda: hf.Dinov2Model(hf.Dinov2Config(**VIT)))
    add_images("swin", lambda: hf.SwinModel(hf.SwinConfig(**window)))
    add_images("swinv2", lambda: hf.Swinv2Model(hf.Swinv2Config(**window)))
    add_images(
        "segformer",
        lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                hidden_sizes=[16, 32, 32, 64],
                depths=[1, 1, 1, 1],
                num_attention_heads=[1, 2, 2, 4],
                decoder_hidden_size=32,
            )
        ),
        64,
    )
    add_images("convnext", lambda: hf.ConvNextModel(hf.ConvNextConfig(**stages)), 64)
    add_images("convnextv2", lambda: hf.ConvNextV2Model(hf.ConvNextV2Config(**stages)), 64)
    add_images("poolformer", lambda: hf.PoolFormerModel(hf.PoolFormerConfig(**stages)), 64)
    add_images(
        "mobilevit",
        lambda: hf.MobileViTModel(
            hf.MobileViTConfig(hidden_sizes=[24, 32, 40], neck_hidden_sizes=[8, 16, 24, 32, 40, 40, 64], image_size=64)
        ),
        64,
    )
    add_images(
        "levit",
        lambda: hf.LevitModel(
            hf.LevitConfig(
                image_size=64,
                hidden_sizes=[32, 48, 64],
                key_dim=[8, 8, 8],
                num_attention_heads=[2, 3, 4],
                depths=[1, 1, 1],
            )
        ),
        64,
    )
    add_images(
        "yolos",
        lambda: hf.YolosForObjectDetection(hf.YolosConfig(**{**VIT, "image_size": [32, 32]}, num_detection_tokens=5)),
    )
    add_images(
        "dpt",
        lambda: hf.DPTForDepthEstimation(
            hf.DPTConfig(
                **{**VIT, "num_hidden_layers": 4},
                backbone_out_indices=[0, 1, 2, 3],
                neck_hidden_sizes=[8, 16, 16, 16],
                fusion_hidden_size=16,
            )
        ),
    )
    add_images("clip_vision", lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VIT)))
    add_images("siglip_vision", lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VIT)))
    detr = {
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "num_queries": 5,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
    }
    backbone = {"embedding_size": 16, **stages, "out_features": ["stage4"]}
    add_images(
        "detr",
        lambda: hf.DetrForObjectDetection(hf.DetrConfig(**detr, backbone_config=hf.ResNetConfig(**backbone))),
        64,
    )
    for name in (
        "resnet18",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "efficientnet_b0",
        "shufflenet_v2_x0_5",
        "squeezenet1_1",
        "densenet121",
        "regnet_y_400mf",
        "mnasnet0_5",
        "googlenet",
        "convnext_tiny",
        "swin_t",
        "swin_v2_t",
        "maxvit_t",
        "vit_b_32",
        "alexnet",
        "inception_v3",
    ):
        add_torchvision(name)


def add_torchvision(name: str) -> None:
    size = {"inception_v3": 299}.get(name, 224)
    CASES[f"tv_{name}"] = Case(
        lambda: torchvision.models.get_model(name, weights=None),
        images(size, "image"),
        {"image": {0: "batch"}},
        sizes=((1, 0), (2, 0)),
        forward=lambda model, image: model(image),
    )


def add_sound() -> None:
    small = {
        **SMALL,
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "vocab_size": 32,
    }

    def waves(batch: int, length: int) -> dict[str, Tensor]:
        return {"input_values": torch.randn(batch, 40 * length)}

    for name, config, model in (
        ("wav2vec2", hf.Wav2Vec2Config, hf.Wav2Vec2ForCTC),
        ("hubert", hf.HubertConfig, hf.HubertModel),
        ("wavlm", hf.WavLMConfig, hf.WavLMModel),
    ):
        CASES[name] = Case(partial(built, model, config, small), waves, {"input_values": BATCH_AND_LENGTH})
    ast = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    CASES["audio_spectrogram"] = Case(
        lambda: hf.ASTForAudioClassification(hf.ASTConfig(**ast, max_length=64, num_mel_bins=32)),
        lambda batch, length: {"input_values": torch.randn(batch, 64, 32)},
        {"input_values": {0: "batch"}},
    )


def add_several_kinds() -> None:
    texts = {**SMALL, "eos_token_id": 99}
    CASES["clip"] = Case(
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=texts, vision_config=VIT, projection_dim=32)),
        lambda batch, length: text(batch, length) | images(32)(batch + 1, 0),
        {"input_ids": BATCH_AND_LENGTH, "attention_mask": BATCH_AND_LENGTH, "pixel_values": {0: "images"}},
        forward=lambda model, **given: list(model(**given).values())[:2],
    )


# -- writing -----------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, exporter: str) -> None:
    case = CASES[name]
    torch.manual_seed(7)
    model = Exported(case, case.build()).eval()
    example = tuple(case.inputs(*case.example).values())
    target = folder / f"{name}.{exporter}"
    target.mkdir(parents=True, exist_ok=True)
    path = target / "model.onnx"
    with torch.no_grad():
        if exporter == "dynamo":
            free = torch.export.Dim.DYNAMIC
            shapes = tuple(dict.fromkeys(axes, free) for axes in case.axes.values())
            program = torch.onnx.export(
                model, example, dynamo=True, dynamic_shapes=(shapes,), input_names=list(case.axes), verbose=False
            )
            program.save(path, external_data=False)
        else:
            names = [f"output_{index}" for index in range(len(model(*example)))]
            axes = {each: dict(free) for each, free in case.axes.items()}
            torch.onnx.export(
                model,
                example,
                path,
                dynamo=False,
                input_names=list(case.axes),
                output_names=names,
                dynamic_axes=axes,
                opset_version=17,
            )
        for index, sizes in enumerate(case.sizes):
            given = case.inputs(*sizes)
            np.savez(target / f"feeds-{index}.npz", **{key: tensor.numpy() for key, tensor in given.items()})
            outputs = model(*given.values())
            np.savez(target / f"outputs-{index}.npz", *[tensor.numpy() for tensor in outputs])


def main(folder: Path, names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    add_encoders(), add_decoders(), add_encoder_decoders(), add_vision(), add_sound(), add_several_kinds()
    for name in names or sorted(CASES.keys() - LARGE):
        for exporter in CASES[name].exporters:
            try:
                with redirect_stdout(None):  # the exporters talk
                    write(folder, name, exporter)
            except Exception as error:
                shutil.rmtree(folder / f"{name}.{exporter}", ignore_errors=True)
                print(
                    f"{name}.{exporter}: {type(error).__name__}: {' '.join(str(error).split())[-200:]}", file=sys.stderr
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
