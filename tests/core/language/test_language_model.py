"""Folders and files that `load_language_model` reads: older forms, weights, and errors that name what does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import lathe
from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.language.document import Document
from lathe.core.language.hugging_face import read_settings
from lathe.core.language.settings import Llama3Scaling, Rotary
from tests.core.language.checkpoints import IDS, gguf_parts
from tests.core.language.families import EXPECTED, config, weights, write_folder
from tests.core.language.gguf_writer import floats, gguf_bytes


def write(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def assert_same_logits(path: Path, name: str) -> None:
    model = lathe.load_language_model(path)
    expected = EXPECTED[f"{name}/logits"]
    np.testing.assert_allclose(model.module(IDS).numpy(), expected, 1e-4, 1e-4 * np.abs(expected).max())


def test_rotary_settings_of_older_files(tmp_path: Path) -> None:
    old = config("llama-tied")
    new = old.pop("rope_parameters")
    old["rope_theta"] = new.pop("rope_theta")
    for field in ("rope_type", "type"):  # the second is the oldest name
        old["rope_scaling"] = {field: new["rope_type"], **{key: new[key] for key in new if key != "rope_type"}}
        assert_same_logits(write(tmp_path, old, weights("llama-tied")), "llama-tied")


def test_frequencies_of_llama_3() -> None:
    """By the paper's cases: low frequencies are divided, high ones are not, those between lie between."""
    plain = Rotary(500_000.0).frequencies(128)
    scaled = Rotary(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)).frequencies(128)
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4], 1e-6)
    np.testing.assert_allclose(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8, 1e-6)
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    assert between.any()
    assert ((plain / 8 < scaled) & (scaled < plain))[between].all()


def test_names_without_a_prefix_and_tensors_that_nothing_needs(tmp_path: Path) -> None:
    """The published file of GPT-2 has no prefix, and the masks as buffers; files of Llama 2 have the frequencies."""
    bare = {name.removeprefix("transformer."): array for name, array in weights("gpt2").items()}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    assert_same_logits(write(tmp_path, config("gpt2"), bare), "gpt2")
    tied = {name.removeprefix("model."): array for name, array in weights("llama-tied").items()}
    more = {
        "layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32),
        "lm_head.weight": tied["embed_tokens.weight"],
    }
    assert_same_logits(write(tmp_path, config("llama-tied"), tied | more), "llama-tied")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_weights_of_other_types_become_float32(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes  # registers bfloat16 with NumPy  # noqa: F401

    narrow = {name: array.astype(dtype) for name, array in weights("llama").items()}
    model = lathe.load_language_model(write(tmp_path, config("llama"), narrow))
    for name, parameter in model.module.named_parameters():
        assert parameter.data.dtype == np.float32
        np.testing.assert_array_equal(parameter.data, narrow[name].astype(np.float32))


def test_float32_weights_exist_once(tmp_path: Path) -> None:
    """Module and graph refer to the pages of the file."""
    model = lathe.load_language_model(write_folder(tmp_path, "llama"))
    constants = {value.name: array for value, array in model.graph.constants.items()}
    for name, parameter in model.module.named_parameters():
        assert not parameter.data.flags.owndata
        assert np.shares_memory(parameter.data, constants[name])


def test_more_tokens_than_learned_positions_are_an_error(tmp_path: Path) -> None:
    graph = lathe.load_language_model(write_folder(tmp_path, "gpt2")).graph
    with lathe.compile(graph, threads=1, tune="off", new_shapes="wait") as session:
        assert session.run({"input_ids": np.zeros((1, 128), np.int64)})["logits"].shape == (1, 128, 97)
        with pytest.raises(FeedError):
            session.run({"input_ids": np.zeros((1, 129), np.int64)})
        with pytest.raises(FeedError):
            session.run({"input_ids": np.full((1, 3), 97)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"model_type": "bert"}, "model_type: expected one of llama, mistral, mixtral, qwen2, "),
        ("llama", {"model_type": None}, r"model_type: expected one of llama, .*, gpt2, got nothing\b"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: quantized folders are not supported"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act: expected one of silu, "),
        ("llama", {"hidden_size": None}, "hidden_size: expected an integer from 1 to 16777216, got nothing"),
        ("llama", {"hidden_size": 48.0}, "hidden_size: expected an integer from 1 to 16777216, got 48.0"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 1024"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps: expected a positive number, got -1"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type: expected one of default, "),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: only 1 is supported"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters: expected an object, got \[1\]"),
        ("llama", {"head_dim": 7}, "expected an even size, got 7"),
        ("llama", {"num_key_value_heads": 3}, "4 heads cannot share 3 heads of keys"),
        ("llama", {"vocab_size": 1 << 20}, "needs a weight of 50331648 elements"),
        ("llama", {"intermediate_size": 71}, r"gives parameter 'model.layers.0.mlp.gate_proj.weight' the shape"),
        ("llama", {"num_hidden_layers": 3}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
        ("llama", {"num_hidden_layers": 1}, "tensor 'model.layers.1.input_layernorm.weight' belongs to no parameter"),
        ("llama", {"attention_bias": True}, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types: expected 2 of sliding_attention and full"),
        ("qwen2-moe", {"num_experts_per_tok": 9}, "qwen2_moe: 9 experts of a token: there are only 6"),
        ("qwen2-moe", {"num_experts": 1 << 20}, "needs experts of 4026531840 elements in a layer; all tensors have"),
        ("qwen2-moe", {"num_experts": 7}, "the shape [6, 48], expected [7, 48]"),
        ("qwen3-moe", {"mlp_only_layers": "0"}, 'mlp_only_layers: expected a list of layers, got "0"'),
        ("mixtral", {"intermediate_size": 73}, "the shape [6, 144, 48], expected [6, 146, 48]"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: only true is supported"),
        ("gpt2", {"n_embd": 47}, "which does not fit|the shape"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    folder = write(tmp_path, {**config(name), **change}, weights(name))
    with pytest.raises(ModelError, match=message if "|" in message or "\\" in message else re.escape(message)):
        lathe.load_language_model(folder)


def test_windows_of_mistral() -> None:
    """A missing field has Transformers' default; null stands for no window."""
    plain = {key: value for key, value in config("mistral").items() if key != "sliding_window"}
    for given, window in (({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)):
        assert read_settings(Document("config.json", {**plain, **given})).windows == (window, window)


def test_a_folder_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        lathe.load_language_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read: No such file"):
        lathe.load_language_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": ("str", "mamba")},
            "general.architecture: expected one of llama, qwen2, qwen2moe, ",
        ),
        ({"llama.block_count": ("str", "2")}, 'llama.block_count: expected an integer from 1 to 1024, got "2"'),
        ({"llama.expert_count": ("u32", 8)}, "llama.expert_used_count: expected an integer from 1 to"),
        ({"llama.rope.scaling.type": ("str", "yarn")}, "llama.rope.scaling.type: expected one of none, linear"),
        ({"llama.rope.dimension_count": ("u32", 6)}, "all 12 elements of a head are rotated, got 6"),
        ({"llama.attention.value_length": ("u32", 6)}, "expected keys and values of the same size"),
        ({"llama.attention.head_count": ("u32", 5)}, "5 heads cannot share 2 heads"),
        ({"tokenizer.chat_template": ("u32", 5)}, "tokenizer.chat_template: expected text, got 5"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    metadata, arrays = gguf_parts(config("llama"), weights("llama"))
    content = gguf_bytes(metadata | change, {key: floats(array) for key, array in arrays.items()})
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(message)):
        lathe.load_language_model(tmp_path / "model.gguf")


def test_a_weight_of_an_unread_type_is_named(tmp_path: Path) -> None:
    metadata, arrays = gguf_parts(config("llama"), weights("llama"))
    tensors = {key: floats(array) for key, array in arrays.items()}
    tensors["output_norm.weight"] = (13, (256,), bytes(176))
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, tensors))
    with pytest.raises(UnsupportedError, match=r"tensor 'output_norm\.weight': has type Q5_K, expected one of F32"):
        lathe.load_language_model(tmp_path / "model.gguf")
