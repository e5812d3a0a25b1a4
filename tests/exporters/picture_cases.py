"""Models of images and sound, of Transformers and torchvision, and of several kinds of input."""

from __future__ import annotations

from functools import partial

import torch

# torchvision's own operators are not in the wheel for CPUs; it cannot be imported without their declarations.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402
import transformers as hf  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers_case import BATCH_AND_LENGTH, CASES, SMALL, Case, add_image_sizes, add_images, built, images, text  # noqa: E402

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
    segformer = {
        "hidden_sizes": [16, 32, 32, 64],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 32,
    }
    for add, name in ((partial(add_images, size=64), "segformer"), (add_image_sizes, "segformer_sizes")):
        add(name, lambda: hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**segformer)))
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
        "vgg16",
    ):
        add_torchvision(name)
    for name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0"):
        add_image_sizes(f"tv_{name}_sizes", partial(torchvision.models.get_model, name, weights=None), seen)


LARGE = frozenset({"tv_vgg16"})  # 553 MB: written only if the command names it


def seen(model: nn.Module, pixel_values: Tensor) -> Tensor:
    found: Tensor = model(pixel_values)
    return found


def add_torchvision(name: str) -> None:
    size = {"inception_v3": 299}.get(name, 224)
    CASES[f"tv_{name}"] = Case(
        lambda: torchvision.models.get_model(name, weights=None),
        images(size, "image"),
        {"image": {0: "batch"}},
        sizes=((1, 0), (2, 0), (8, 0)),
        lengths=(),
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
        lengths=(),
    )


def add_several_kinds() -> None:
    texts = {**SMALL, "eos_token_id": 99}
    CASES["clip"] = Case(
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=texts, vision_config=VIT, projection_dim=32)),
        lambda batch, length: text(batch, length) | images(32)(batch + 1, 0),
        {"input_ids": BATCH_AND_LENGTH, "attention_mask": BATCH_AND_LENGTH, "pixel_values": {0: "images"}},
        forward=lambda model, **given: list(model(**given).values())[:2],
    )


def add_all() -> None:
    add_vision()
    add_sound()
    add_several_kinds()
