"""Folders with a decoder as ONNX file: Optimum's form and that of ONNX Runtime GenAI, generating as language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.language.generation.generator import TextGenerator, memory_bytes
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.onnx_decoder import load_onnx_decoder
from lathe.core.language.sampling import SamplingSettings
from tests.core.decoders import DEPTH, HEADS, WORDS
from tests.core.language.past_decoders import GENAI_SIZE, exported_decoder, group_query_decoder
from tests.core.language.test_tokenizer import trained
from tests.onnx_runtime import plain_session

OPTIONS = GeneratorOptions(cache_bytes=1 << 20, threads=1)
PROMPT = (3, 17, 8, 41, 5)
GENAI = {"model": {"context_length": 60, "vocab_size": WORDS, "eos_token_id": 2, "decoder": {"filename": "text.onnx"}}}


def write_optimum(folder: Path) -> ModelProto:
    model = exported_decoder(shared=2, layers=2)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 60, "vocab_size": WORDS}))
    trained().save(str(folder / "tokenizer.json"))
    return model


def write_genai(folder: Path) -> ModelProto:
    """The weights are in a file of their own."""
    model = group_query_decoder()
    kept = ModelProto()
    kept.CopyFrom(model)
    onnx.save_model(
        model, folder / "text.onnx", save_as_external_data=True, location="text.onnx.data", size_threshold=0
    )
    (folder / "genai_config.json").write_text(json.dumps(GENAI))
    trained().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return kept


WRITERS = {"optimum": write_optimum, "genai": write_genai}


def greedy(model: ModelProto, prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens that ONNX Runtime finds, running the whole text for each."""
    session, tokens = plain_session(model.SerializeToString()), list(prompt)
    names = [each.name for each in session.get_inputs() if each.name.startswith("past")]
    size = GENAI_SIZE if any(node.op_type == "GroupQueryAttention" for node in model.graph.node) else DEPTH
    past = np.zeros((1, HEADS // 2, 0, size), np.float32)
    for _ in range(count):
        ids = np.array([tokens])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), **dict.fromkeys(names, past)}
        tokens.append(int(session.run(["logits"], feeds)[0][0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("form", WRITERS)
def test_texts_have_the_tokens_of_onnx_runtime(tmp_path: Path, form: str) -> None:
    model = WRITERS[form](tmp_path)
    generator = TextGenerator.open(tmp_path, OPTIONS)
    request = GenerationRequest(PROMPT, SamplingSettings(temperature=0), max_tokens=30)
    tokens = [choice.token for part in generator.engine.generate(request) for choice in part.choices]
    assert tokens == greedy(model, PROMPT, 30)
    assert generator.engine.context == 60
    assert generator.end_tokens == (frozenset({2}) if form == "genai" else frozenset())
    assert (generator.model.chat_template is None) == (form == "optimum")
    generator.close()


def test_the_memory_is_known_before_loading(tmp_path: Path) -> None:
    write_genai(tmp_path)
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert memory_bytes(tmp_path, OPTIONS) == 2 * files + OPTIONS.cache_bytes


@pytest.mark.parametrize(
    ("genai", "error", "message"),
    [
        ({"model": {}}, ModelError, "genai_config.json: expected the objects model and model.decoder"),
        ({"model": {"decoder": {"filename": "../x"}}}, ModelError, "filename: expected an ONNX file beside"),
        ({"model": {"decoder": {"filename": "none.onnx"}}}, ModelError, "filename: expected an ONNX file beside"),
        ({"model": {**GENAI["model"], "context_length": 0}}, ModelError, "context_length: expected an integer from 1"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, genai: Any, error: type[Exception], message: str) -> None:
    write_genai(tmp_path)
    (tmp_path / "genai_config.json").write_text(json.dumps(genai))
    with pytest.raises(error, match=message):
        load_onnx_decoder(tmp_path)


def test_a_graph_without_past_is_refused(tmp_path: Path) -> None:
    write_optimum(tmp_path)
    other = exported_decoder(lambda name: name.replace("past_key_values", "before"))
    (tmp_path / "model.onnx").write_bytes(other.SerializeToString())
    with pytest.raises(UnsupportedError, match=r"expected inputs past_key_values\.N\.key and \.value"):
        load_onnx_decoder(tmp_path)
