"""Decoders of ONNX Runtime GenAI over pages: ONNX Runtime's logits, any mix of chunks; other forms are left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from lathe.core.compiler import pipeline
from lathe.core.language.cached_graph import CacheLayout
from lathe.core.language.paged_onnx import paged_models
from lathe.core.language.paged_onnx_decoder import PagedOnnxDecoder
from lathe.core.language.text_sizes import TextSizes
from lathe.core.language.token_runner import Chunk
from tests.core.decoders import HEADS, WORDS
from tests.core.language.past_decoders import GENAI_SIZE, exported_decoder, group_query_decoder
from tests.core.language.test_past_runner import PAGES, TOKENS, chunk, expected

SIZES = TextSizes(WORDS, 40, 1, HEADS // 2, GENAI_SIZE)
FORMS = {
    "plain": {},
    "rotary": {"do_rotary": 1, "scale": 0.3},
    "interleaved": {"do_rotary": 1, "rotary_interleaved": 1},
    "window": {"do_rotary": 1, "local_window_size": 6},
}


def decoder_of(folder: Path, model: ModelProto) -> PagedOnnxDecoder | None:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return PagedOnnxDecoder.of(path, SIZES, pages=15, page_size=8, capacity=80, threads=1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_onnx_runtime(tmp_path: Path, form: str) -> None:
    """Prompts, parts of prompts and single tokens share runs; native code, in place, and no code for a length."""
    model = group_query_decoder(**FORMS[form])
    logits, runner = expected(model, 1, GENAI_SIZE), decoder_of(tmp_path, model)
    assert runner is not None
    first = runner.run([chunk(0, 0, 5), chunk(1, 0, 17, 0), chunk(2, 0, 5, 1)])
    np.testing.assert_allclose(first, np.concatenate([logits[0, :5], logits[2, 4:5]]), 1e-4, 1e-5)
    second = runner.run([chunk(2, 5, 40, 2), chunk(1, 17, 18), chunk(0, 5, 6)])
    np.testing.assert_allclose(second, np.stack([*logits[2, 38:], logits[1, 17], logits[0, 5]]), 1e-4, 1e-5)
    for executable in runner.executables:
        assert "FALLBACK" not in "\n".join(executable.explain(1))
        assert not executable.plan.copies, "the cache is written in place"
    runner.close()


def test_nothing_is_compiled_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, calls = decoder_of(tmp_path, group_query_decoder()), []
    assert runner is not None
    monkeypatch.setattr(pipeline, "build", lambda *arguments: calls.append(arguments))
    for length in range(1, 41):
        runner.run([Chunk(TOKENS[0, :length], 0, PAGES[0])])
    assert not calls


def changed_type(name: str, type_: int) -> ModelProto:
    model = group_query_decoder()
    (value,) = (each for each in model.graph.input if each.name == name)
    value.type.tensor_type.elem_type = type_
    return model


def with_a_reader_of_the_mask() -> ModelProto:
    """The logits have the weight of a product that the mask changes."""
    model = group_query_decoder()
    (product,) = (node for node in model.graph.node if "logits" in node.output)
    product.input[1] = "attention_mask"
    return model


@pytest.mark.parametrize(
    "model",
    [
        exported_decoder(shared=2, layers=1),
        group_query_decoder(softcap=30.0),
        group_query_decoder(smooth_softmax=1),
        changed_type("input_ids", TensorProto.INT32),
        changed_type("past_key_values.0.key", TensorProto.FLOAT16),
        with_a_reader_of_the_mask(),
    ],
)
def test_other_forms_are_left_to_the_other_runner(model: ModelProto) -> None:
    assert paged_models(model, SIZES, CacheLayout(15, 8)) is None


def test_a_layer_without_its_cache_is_left(tmp_path: Path) -> None:
    sizes: Any = TextSizes(WORDS, 40, 2, HEADS // 2, GENAI_SIZE)
    assert paged_models(group_query_decoder(), sizes, CacheLayout(15, 8)) is None
