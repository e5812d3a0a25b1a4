"""Further architectures of Transformers, none of which Lathe was written for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from text_cases import logits
from torch import Tensor, nn
from transformers_case import BATCH_AND_LENGTH, CASES, SMALL, Case, add_images, add_text, built, text

STAGES = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def add_encoders() -> None:
    for name in ("Camembert", "Data2VecText", "MegatronBert", "RemBert", "Luke", "Splinter", "Esm", "RoCBert", "Xmod"):
        add_text(name.lower(), getattr(hf, f"{name}Config"), getattr(hf, f"{name}Model"), **ENCODERS.get(name, {}))
    add_text("camembert_tokens", hf.CamembertConfig, hf.CamembertForTokenClassification)
    add_text("bert_questions", hf.BertConfig, hf.BertForQuestionAnswering)
    add_text("bert_words", hf.BertConfig, hf.BertForMaskedLM)
    add_text("distilbert_classifier", hf.DistilBertConfig, hf.DistilBertForSequenceClassification, **DISTILBERT)
    add_text("deberta_v2_classifier", hf.DebertaV2Config, hf.DebertaV2ForSequenceClassification, type_vocab_size=0)
    add_text("modernbert_words", hf.ModernBertConfig, hf.ModernBertForMaskedLM, local_attention=8)
    add_text("eurobert", hf.EuroBertConfig, hf.EuroBertModel, num_key_value_heads=4)
    add_text("nomicbert", hf.NomicBertConfig, hf.NomicBertModel)
    add_text("flaubert", hf.FlaubertConfig, hf.FlaubertModel, emb_dim=64, n_layers=2, n_heads=4)
    add_text("xlm", hf.XLMConfig, hf.XLMModel, emb_dim=64, n_layers=2, n_heads=4)
    add_text("ibert", hf.IBertConfig, hf.IBertModel)
    add_text("xlm_roberta_xl", hf.XLMRobertaXLConfig, hf.XLMRobertaXLModel)
    add_text("funnel", hf.FunnelConfig, hf.FunnelBaseModel, block_sizes=[1, 1], d_model=64, n_head=4, d_head=16)
    add_text("big_bird", hf.BigBirdConfig, hf.BigBirdModel, attention_type="original_full")
    add_text("longformer", hf.LongformerConfig, hf.LongformerModel, attention_window=8)
    add_text("umt5_encoder", hf.UMT5Config, hf.UMT5EncoderModel, **T5)
    add_text("mt5_encoder", hf.MT5Config, hf.MT5EncoderModel, **T5)
    add_text("siglip_text", hf.SiglipTextConfig, hf.SiglipTextModel)
    add_text("flava_text", hf.FlavaTextConfig, hf.FlavaTextModel)
    add_text("lilt", hf.LiltConfig, hf.LiltModel, channel_shrink_ratio=4)
    add_text("canine", hf.CanineConfig, hf.CanineModel, local_transformer_stride=8, num_hash_buckets=64)


DISTILBERT = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
ENCODERS: dict[str, dict[str, Any]] = {
    "RemBert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "Luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "Esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "RoCBert": {"enable_pronunciation": False, "enable_shape": False},
    "Xmod": {"languages": ["en"], "default_language": "en"},
}


def add_decoders() -> None:
    grouped = {"num_key_value_heads": 2}
    for name, sizes in DECODERS.items():
        config = getattr(hf, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
        add_text(name.lower(), config, getattr(hf, f"{name}ForCausalLM"), logits, **{**grouped, **sizes})


GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
DECODERS: dict[str, dict[str, Any]] = {
    "Phi3": {},
    "Gemma3": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Granite": {},
    "StableLm": {},
    "Cohere": {},
    "Starcoder2": {},
    "GPTJ": {**GPT, "rotary_dim": 8},
    "CodeGen": {**GPT, "rotary_dim": 8},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "GPTBigCode": GPT,
    "Mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "Persimmon": {},
    "Nemotron": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4, "head_dim": 16},
    "Xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    "BioGpt": {},
    "Helium": {"head_dim": 16},
    "Arcee": {},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16},
    "Exaone4": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Ministral": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "ModernBertDecoder": {"local_attention": 8},
    "Mamba": {"state_size": 4, "intermediate_size": 128},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
}
DECODERS["XGLM"] = DECODERS.pop("Xglm")


def add_vision() -> None:
    add_images("resnet_hf", lambda: hf.ResNetForImageClassification(hf.ResNetConfig(embedding_size=16, **STAGES)), 64)
    add_images("regnet_hf", lambda: hf.RegNetModel(hf.RegNetConfig(embedding_size=16, groups_width=8, **STAGES)), 64)
    add_images("efficientnet_hf", lambda: hf.EfficientNetModel(hf.EfficientNetConfig(width_coefficient=0.25)), 64)
    add_images("mobilenet_v1_hf", lambda: hf.MobileNetV1Model(hf.MobileNetV1Config(depth_multiplier=0.25)), 64)
    add_images("mobilenet_v2_hf", lambda: hf.MobileNetV2Model(hf.MobileNetV2Config(depth_multiplier=0.35)), 64)
    add_images("bit", lambda: hf.BitModel(hf.BitConfig(embedding_size=16, num_groups=4, **STAGES)), 64)
    add_images("pvt", lambda: hf.PvtModel(hf.PvtConfig(image_size=64, **STAGES)), 64)
    add_images(
        "pvt_v2", lambda: hf.PvtV2Model(hf.PvtV2Config(image_size=64, num_attention_heads=[1, 2, 4, 8], **STAGES)), 64
    )
    add_images(
        "cvt", lambda: hf.CvtModel(hf.CvtConfig(embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 1, 1])), 64
    )
    add_images(
        "focalnet", lambda: hf.FocalNetModel(hf.FocalNetConfig(image_size=64, embed_dim=16, depths=[1, 1, 1, 1])), 64
    )
    add_images("dinov2_registers", lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**VIT)))
    add_images("dinov3_vit", lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**VIT)))
    add_images("data2vec_vision", lambda: hf.Data2VecVisionModel(hf.Data2VecVisionConfig(**VIT)))
    add_images("hiera", lambda: hf.HieraModel(hf.HieraConfig(**HIERA)), 64)
    add_images("swiftformer", lambda: hf.SwiftFormerModel(hf.SwiftFormerConfig(**SWIFT)), 64)
    add_images("glpn", lambda: hf.GLPNForDepthEstimation(hf.GLPNConfig(**GLPN)), 64)
    add_images(
        "mobilevit_v2", lambda: hf.MobileViTV2Model(hf.MobileViTV2Config(image_size=64, width_multiplier=0.5)), 64
    )
    add_images("vit_mae", lambda: hf.ViTMAEModel(hf.ViTMAEConfig(**VIT, mask_ratio=0.0)))
    add_images("ijepa", lambda: hf.IJepaModel(hf.IJepaConfig(**VIT)))
    add_images("vit_msn", lambda: hf.ViTMSNModel(hf.ViTMSNConfig(**VIT)))
    add_images("blip_vision", lambda: hf.BlipVisionModel(hf.BlipVisionConfig(**VIT)))
    add_images("git_vision", lambda: hf.GitVisionModel(hf.GitVisionConfig(**VIT)))
    add_images("aimv2", lambda: hf.Aimv2VisionModel(hf.Aimv2VisionConfig(**VIT)))
    add_images(
        "beit_segments",
        lambda: hf.BeitForImageClassification(hf.BeitConfig(**VIT, use_absolute_position_embeddings=True)),
    )
    add_images("dinov2_classifier", lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**VIT)))
    add_images(
        "depth_anything",
        lambda: hf.DepthAnythingForDepthEstimation(
            hf.DepthAnythingConfig(
                backbone_config=hf.Dinov2Config(**VIT, out_features=["stage1", "stage2"], reshape_hidden_states=False),
                reassemble_hidden_size=64,
                patch_size=8,
                neck_hidden_sizes=[16, 16],
                reassemble_factors=[2, 1],
                fusion_hidden_size=16,
            )
        ),
    )
    add_images("owlvit_vision", lambda: hf.OwlViTVisionModel(hf.OwlViTVisionConfig(**VIT)))
    add_images("swin2sr", lambda: hf.Swin2SRForImageSuperResolution(hf.Swin2SRConfig(**SWIN2SR)), 32)
    add_images("vitpose", lambda: hf.VitPoseForPoseEstimation(vitpose()), 64)
    add_images(
        "table_transformer", lambda: hf.TableTransformerForObjectDetection(hf.TableTransformerConfig(**detr())), 64
    )
    add_images("conditional_detr", lambda: hf.ConditionalDetrForObjectDetection(hf.ConditionalDetrConfig(**detr())), 64)
    add_images("rt_detr", lambda: hf.RTDetrForObjectDetection(hf.RTDetrConfig(**RT_DETR)), 128)
    add_images("rt_detr_v2", lambda: hf.RTDetrV2ForObjectDetection(hf.RTDetrV2Config(**RT_DETR)), 128)
    add_images("d_fine", lambda: hf.DFineForObjectDetection(hf.DFineConfig(**RT_DETR)), 128)
    add_images("maskformer_swin", lambda: hf.MaskFormerSwinModel(hf.MaskFormerSwinConfig(**SWIN)), 32)


HIERA = {
    "image_size": [64, 64],
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 4, 8],
    "query_stride": [2, 2],
    "patch_stride": [4, 4],
    "masked_unit_size": [8, 8],
}
SWIFT = {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [16, 32, 32, 64], "num_channels": 3}
GLPN = {
    "hidden_sizes": [16, 32, 32, 64],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 32,
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SWIN2SR = {"image_size": 32, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
RT_DETR = {
    "d_model": 32,
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [32, 64, 64],
    "decoder_in_channels": [32, 32, 32],
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 10,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_denoising": 0,
    "hidden_expansion": 0.5,
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 64, 64],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "use_pretrained_backbone": False,
}


def detr() -> dict[str, Any]:
    backbone = hf.ResNetConfig(embedding_size=16, **STAGES, out_features=["stage4"])
    return {
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
        "backbone_config": backbone,
    }


def vitpose() -> Any:
    backbone = hf.VitPoseBackboneConfig(**{**VIT, "image_size": [64, 64]}, out_features=["stage2"])
    return hf.VitPoseConfig(backbone_config=backbone, num_labels=7)


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

    axes = {"input_values": BATCH_AND_LENGTH}
    for name, config, model in (
        ("unispeech", hf.UniSpeechConfig, hf.UniSpeechModel),
        ("unispeech_sat", hf.UniSpeechSatConfig, hf.UniSpeechSatModel),
        ("data2vec_audio", hf.Data2VecAudioConfig, hf.Data2VecAudioModel),
        ("sew", hf.SEWConfig, hf.SEWModel),
        ("wav2vec2_conformer", hf.Wav2Vec2ConformerConfig, hf.Wav2Vec2ConformerModel),
    ):
        CASES[name] = Case(partial(built, model, config, small), waves, axes)

    def features(width: int) -> Any:
        return lambda batch, length: {"input_features": torch.randn(batch, 4 * length, width)}

    CASES["speech2text"] = Case(
        lambda: hf.Speech2TextModel(hf.Speech2TextConfig(**SPEECH)).get_encoder(),
        features(16),
        {"input_features": BATCH_AND_LENGTH},
    )
    CASES["wav2vec2_bert"] = Case(
        lambda: hf.Wav2Vec2BertModel(hf.Wav2Vec2BertConfig(**SMALL, feature_projection_input_dim=16)),
        features(16),
        {"input_features": BATCH_AND_LENGTH},
    )
    CASES["moonshine"] = Case(
        lambda: hf.MoonshineModel(hf.MoonshineConfig(**MOONSHINE)).get_encoder(),
        lambda batch, length: {"input_values": torch.randn(batch, 384 * (length + 4))},
        axes,
    )
    CASES["encodec"] = Case(
        lambda: hf.EncodecModel(hf.EncodecConfig(num_filters=4, hidden_size=16, codebook_size=64, codebook_dim=16)),
        lambda batch, length: {"input_values": torch.randn(batch, 1, 320 * length)},
        {"input_values": {0: "batch", 2: "length"}},
        forward=lambda model, input_values: model.encoder(input_values),
    )
    CASES["vits_flow"] = Case(
        lambda: hf.PatchTSTModel(hf.PatchTSTConfig(**PATCH)),
        lambda batch, length: {"past_values": torch.randn(batch, 32, 3)},
        {"past_values": {0: "batch"}},
        lengths=(),
        forward=lambda model, past_values: model(past_values).last_hidden_state,
    )


SPEECH = {
    "vocab_size": 100,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "conv_channels": 64,
    "input_feat_per_channel": 16,
    "max_source_positions": 200,
}
MOONSHINE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
}
PATCH = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "num_hidden_layers": 2,
    "d_model": 64,
    "num_attention_heads": 4,
    "ffn_dim": 96,
}


def add_several_kinds() -> None:
    def both(batch: int, length: int) -> dict[str, Tensor]:
        return text(batch, length) | {"pixel_values": torch.randn(batch, 3, 32, 32)}

    axes = {"input_ids": BATCH_AND_LENGTH, "attention_mask": BATCH_AND_LENGTH, "pixel_values": {0: "batch"}}
    CASES["vilt"] = Case(
        lambda: hf.ViltModel(hf.ViltConfig(**{**SMALL, **VIT}, max_image_length=-1)), both, axes, forward=vilt
    )
    CASES["blip_retrieval"] = Case(
        lambda: hf.BlipForImageTextRetrieval(
            hf.BlipConfig(text_config={**SMALL, "encoder_hidden_size": 64}, vision_config=VIT)
        ),
        both,
        axes,
        forward=lambda model, input_ids, attention_mask, pixel_values: (
            model(input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values).itm_score
        ),
    )
    CASES["bert_types"] = Case(
        partial(built, hf.BertModel, hf.BertConfig, SMALL),
        lambda batch, length: (
            text(batch, length) | {"token_type_ids": (torch.arange(length)[None].repeat(batch, 1) > 3).long()}
        ),
        dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), BATCH_AND_LENGTH),
    )
    CASES["bert_sdpa_no_mask"] = Case(
        partial(built, hf.BertModel, hf.BertConfig, SMALL),
        lambda batch, length: {"input_ids": text(batch, length)["input_ids"]},
        {"input_ids": BATCH_AND_LENGTH},
    )
    CASES["layoutlm"] = Case(
        partial(built, hf.LayoutLMModel, hf.LayoutLMConfig, SMALL),
        lambda batch, length: text(batch, length) | {"bbox": torch.arange(4).repeat(batch, length, 1) * 9},
        {"input_ids": BATCH_AND_LENGTH, "attention_mask": BATCH_AND_LENGTH, "bbox": BATCH_AND_LENGTH},
    )


def vilt(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
    found: Tensor = model(
        input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values
    ).last_hidden_state
    return found


def add_all() -> None:
    add_encoders()
    add_decoders()
    add_vision()
    add_sound()
    add_several_kinds()
