"""T5 and Whisper against the results of Transformers, which `make_encoder_decoders.py` records."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import lathe
from lathe import nn
from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.language.log_mel import LogMel, padded_audio
from lathe.core.language.relative_bias import bucket_table
from lathe.core.train import step
from lathe.core.train.training_step.losses import CrossEntropy
from lathe.core.train.training_step.optimizers import SGD
from tests.core.language.checkpoints import weight
from tests.core.language.encoder_decoders import (
    BANDS,
    BEGIN,
    CHECKPOINTS,
    EVERY,
    NEW,
    RATE,
    SAMPLES,
    STEPS,
    TARGET,
    sound,
    source,
)
from tests.onnx_runtime import plain_session

_HERE = Path(__file__).parent
RECORDED = json.loads((_HERE / "encoder_decoders.json").read_text())
EXPECTED = np.load(_HERE / "encoder_decoders.npz")
_SLOW = ("t5", "t5-gated", "mt5-untied")  # native code: one T5 is enough
each_model = pytest.mark.parametrize("name", list(CHECKPOINTS))


def write_folder(folder: Path, name: str, **changes: Any) -> Path:
    shapes = RECORDED[name]["shapes"]
    tensors = {key: weight(name, key, tuple(shape)) for key, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**copy.deepcopy(RECORDED[name]["config"]), **changes}
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not ...}))
    return folder


def assert_logits(found: Any, name: str) -> None:
    expected = EXPECTED[f"{name}/logits"]
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4 * np.abs(expected).max(), err_msg=name)


@each_model
def test_logits(tmp_path: Path, name: str) -> None:
    model = lathe.load_encoder_decoder(write_folder(tmp_path, name))
    label, given = source(name)
    feeds = {label: given, "decoder_input_ids": TARGET}
    assert_logits(lathe.interpret(model.graph, feeds)["logits"], name)
    assert_logits(plain_session(lathe.export(model.graph)).run(None, feeds)[0], name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW), "mt5", "whisper"])
def test_native_code_gives_the_same_greedy_tokens(tmp_path: Path, name: str) -> None:
    """The encoder runs once, the decoder for every token."""
    model = lathe.load_encoder_decoder(write_folder(tmp_path, name))
    label, given = source(name)
    options: dict[str, Any] = {"threads": 1, "tune": "off", "new_shapes": "wait"}
    with (
        lathe.compile(model.encoder_graph, **options) as encoder,
        lathe.compile(model.decoder_graph, **options) as decoder,
    ):
        encoded = encoder.run({label: given})["encoded"]
        assert_logits(decoder.run({"decoder_input_ids": TARGET, "encoded": encoded})["logits"], name)
        begins = [("tokens", [model.settings.start]), ("prompted", list(BEGIN))]
        for row, (kind, tokens) in enumerate(begins[: 2 if name == "whisper" else 1]):
            for _ in range(NEW):
                feeds = {"decoder_input_ids": np.array([tokens]), "encoded": encoded[row : row + 1]}
                tokens.append(int(decoder.run(feeds)["logits"][0, -1].argmax()))
            assert tokens == EXPECTED[f"{name}/{kind}"].tolist()
        for session in (encoder, decoder):
            assert "0 on the reference" in session.explain()
            assert session.batching.batchable, session.batching.reason
        assert not decoder._shapes.cached_runners(), "dynamic-shape code serves every length"


class NextToken(nn.Module):
    """The logits of all target tokens but the first, as the loss reads them: [batch, vocabulary, length - 1]."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, given: nn.Tensor, target: nn.Tensor) -> nn.Tensor:
        logits: nn.Tensor = self.module(given, target)
        return logits[:, :-1].transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_training_gives_the_losses_of_pytorch(tmp_path: Path, name: str) -> None:
    model = lathe.load_encoder_decoder(write_folder(tmp_path, name))
    label, given = source(name)
    inner = ",".join(map(str, given.shape[1:]))
    types = {label: f"{given.dtype}[n,{inner}]", "decoder_input_ids": "int64[n,13]"}
    learner = step(nn.trace(NextToken(model.module), types), CrossEntropy(), SGD(RATE), threads=1)
    feeds = {label: given, "decoder_input_ids": TARGET, "target": TARGET[:, 1:]}
    found = [learner.run(feeds)["loss"] for _ in range(STEPS)]
    np.testing.assert_allclose(found, EXPECTED[f"{name}/losses"], 1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bands", BANDS)
def test_spectrograms_are_those_of_transformers(bands: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_CHECK_PLANS", "0")  # the checker takes a minute for 30 seconds of overlapping frames
    graph = nn.trace(LogMel(bands), {"audio": f"float32[batch,{SAMPLES}]"}, ["features"])
    with lathe.compile(graph, threads=1, tune="off") as session:
        assert "0 on the reference" in session.explain()
        louder = np.concatenate([padded_audio(sound(), SAMPLES), padded_audio(3 * sound(), SAMPLES)])
        found = session.run({"audio": louder})["features"]
    assert found.shape == (2, bands, 3000)
    np.testing.assert_allclose(found[0, :, ::EVERY], EXPECTED[f"sound/{bands}"], 0, 1e-4)


def test_the_plan_of_a_short_spectrogram_passes_the_check() -> None:
    graph = nn.trace(LogMel(8), {"audio": "float32[batch,1600]"}, ["features"])
    audio = padded_audio(sound(), 1600)
    with lathe.compile(graph, threads=1, tune="off") as session:
        expected = lathe.interpret(graph, {"audio": audio})["features"]
        np.testing.assert_allclose(session.run({"audio": audio})["features"], expected, 1e-4, 1e-4)


def test_sound_is_cut_or_followed_by_silence() -> None:
    tone = np.sin(np.arange(10.0))
    np.testing.assert_array_equal(padded_audio(tone, 4), [tone[:4].astype(np.float32)])
    np.testing.assert_array_equal(padded_audio(tone, 12)[0, 10:], [0, 0])
    for wrong in (np.zeros((2, 5), np.float32), np.zeros(5, np.int16)):
        with pytest.raises(FeedError, match=r"expected floats \[samples\] of one channel, got"):
            padded_audio(wrong, 4)


@pytest.mark.parametrize("key", [key for key in EXPECTED if key.startswith("buckets/")])
def test_buckets_are_those_of_pytorch(key: str) -> None:
    """Also beyond the greatest distance, by five positions on each side."""
    buckets, distance, both_ways = map(int, key.split("/")[1:])
    table = bucket_table(buckets, distance, bool(both_ways))
    np.testing.assert_array_equal(np.pad(table, 5, mode="edge"), EXPECTED[key])


def test_folders_of_older_versions(tmp_path: Path) -> None:
    """Without the newer fields, with `tie_word_embeddings` false, and with copies of the embedding."""
    folder = write_folder(tmp_path, "t5-gated", scale_decoder_outputs=..., tie_word_embeddings=False)
    tensors = {key: weight("t5-gated", key, tuple(shape)) for key, shape in RECORDED["t5-gated"]["shapes"].items()}
    tensors |= {f"{side}.embed_tokens.weight": tensors["shared.weight"].copy() for side in ("encoder", "decoder")}
    save_file(tensors, folder / "model.safetensors")
    label, given = source("t5-gated")
    found = lathe.load_encoder_decoder(folder).module(given, TARGET)
    assert label == "input_ids"
    assert_logits(found.numpy(), "t5-gated")


def test_a_text_longer_than_the_positions_is_an_error(tmp_path: Path) -> None:
    module = lathe.load_encoder_decoder(write_folder(tmp_path, "whisper")).module
    with pytest.raises(FeedError, match="out of range"):
        module(source("whisper")[1], np.zeros((2, 71), np.int64))


def test_a_spectrogram_of_another_length_is_an_error(tmp_path: Path) -> None:
    module = lathe.load_encoder_decoder(write_folder(tmp_path, "whisper")).module
    with pytest.raises(ModelError, match=r"expected a spectrogram \[batch, 80, 100\], got float32\[2,80,99\]"):
        module(source("whisper")[1][:, :, :99], TARGET)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t5", {"model_type": "bart"}, 'model_type: expected one of t5, mt5, whisper, got "bart"'),
        ("t5", {"feed_forward_proj": "gated-xielu"}, "feed_forward_proj: expected one of silu, "),
        ("t5", {"num_layers": 0}, "num_layers: expected an integer from 1 to 1024, got 0"),
        ("t5", {"relative_attention_num_buckets": 6}, "expected a multiple of 4 buckets"),
        ("t5", {"num_heads": 5}, "the shape [40, 48], expected [50, 48]"),
        ("t5", {"vocab_size": 1 << 20}, "needs a weight of 50331648 elements"),
        ("t5", {"decoder_start_token_id": "x"}, 'decoder_start_token_id: expected a token, got "x"'),
        ("mt5", {"feed_forward_proj": "geglu"}, "feed_forward_proj: expected one of silu, "),
        ("whisper", {"scale_embedding": True}, "scale_embedding: only false is supported"),
        ("whisper", {"decoder_attention_heads": 5}, "5 heads do not share 48 elements evenly"),
        ("whisper", {"num_mel_bins": 128}, "needs a weight of 18432 elements"),
        ("whisper", {"tie_word_embeddings": False}, "tensor 'proj_out.weight' is missing"),
        ("whisper", {"quantization_config": {}}, "quantization_config: quantized folders are not supported"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        lathe.load_encoder_decoder(write_folder(tmp_path, name, **change))


def test_only_whisper_has_sound_as_input(tmp_path: Path) -> None:
    (tmp_path / "t5").mkdir()
    with pytest.raises(UnsupportedError, match="t5 has no sound as input"):
        _ = lathe.load_encoder_decoder(write_folder(tmp_path / "t5", "t5")).features_graph
    graph = lathe.load_encoder_decoder(write_folder(tmp_path, "whisper")).features_graph
    assert str(graph.inputs[0].type) == "float32[batch,16000]"
    assert str(graph.outputs[0].type) == "float32[batch,80,100]"
