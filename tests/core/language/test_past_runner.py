"""Decoders with past as ONNX files, over pages: ONNX Runtime's logits, any mix of chunks, nothing compiled later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import lathe
from lathe.core.compiler import pipeline
from lathe.core.errors import FeedError, UnsupportedError
from lathe.core.language.past_runner import PastRunner
from lathe.core.language.token_runner import Chunk
from tests.core.decoders import DEPTH, HEADS, WORDS
from tests.core.language.past_decoders import GENAI_SIZE, exported_decoder, group_query_decoder
from tests.onnx_runtime import plain_session

MODELS = {"exporters": exported_decoder(shared=2, layers=2), "genai": group_query_decoder()}
LAYERS = {"exporters": 2, "genai": 1}
TOKENS = np.random.default_rng(3).integers(0, WORDS, (3, 40))
PAGE = 8
PAGES = [[7, 2, 9, 4, 11], [0, 6, 1, 8, 3], [10, 5, 12, 14, 13]]  # of each sequence


SIZES = {"exporters": DEPTH, "genai": GENAI_SIZE}


def expected(model: ModelProto, layers: int, size: int) -> Any:
    """ONNX Runtime's logits of whole sequences, for heads of `size` elements."""
    past = np.zeros((len(TOKENS), HEADS // 2, 0, size), np.float32)
    feeds = {f"past_key_values.{layer}.{part}": past for layer in range(layers) for part in ("key", "value")}
    feeds |= {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    return plain_session(model.SerializeToString()).run(["logits"], feeds)[0]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[PastRunner, Any]]:
    model = MODELS[request.param]
    graph = lathe.load(model.SerializeToString())
    runner = PastRunner(graph, vocabulary=WORDS, context=40, pages=15, page_size=PAGE, capacity=80, threads=1)
    yield runner, expected(model, LAYERS[request.param], SIZES[request.param])
    runner.close()


def chunk(sequence: int, start: int, stop: int, wanted: int | None = None) -> Chunk:
    wanted = stop - start if wanted is None else wanted
    return Chunk(TOKENS[sequence, start:stop], start, PAGES[sequence], wanted)


@pytest.mark.sample(2)
def test_chunks_of_any_lengths_give_the_logits_of_whole_sequences(case: tuple[PastRunner, Any]) -> None:
    """Sequences at equal positions share a run, others do not; the rows are in the order of the chunks."""
    runner, logits = case
    first = runner.run([chunk(0, 0, 5), chunk(1, 0, 17, 0), chunk(2, 0, 5, 1)])
    np.testing.assert_allclose(first, np.concatenate([logits[0, :5], logits[2, 4:5]]), 1e-4, 1e-5)
    second = runner.run([chunk(0, 5, 6), chunk(1, 17, 18), chunk(2, 5, 6)])
    np.testing.assert_allclose(second, np.stack([logits[0, 5], logits[1, 17], logits[2, 5]]), 1e-4, 1e-5)
    third = runner.run([chunk(2, 6, 40, 2), chunk(0, 6, 7)])
    np.testing.assert_allclose(third, np.concatenate([logits[2, 38:], logits[0, 6:7]]), 1e-4, 1e-5)
    assert runner.run([]).shape == (0, WORDS)


def test_nothing_is_compiled_after_loading(case: tuple[PastRunner, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runner, logits = case
    calls: list[Any] = []
    monkeypatch.setattr(pipeline, "build", lambda *arguments: calls.append(arguments))
    runner.run([chunk(0, 0, 3, 0)])
    found = [runner.run([chunk(0, at, at + 1)]) for at in range(3, 40)]
    np.testing.assert_allclose(np.concatenate(found), logits[0, 3:], 1e-4, 1e-5)
    for length in range(1, 40):
        runner.run([chunk(1, 0, length, 1), chunk(2, 0, length, 1)])
    assert not calls
    assert not runner._session._shapes.cached_runners(), "dynamic-shape code serves every length"
    assert "0 on the reference" in runner._session.explain()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Chunk(TOKENS[0, :0], 0, PAGES[0], 0), "chunk 0: expected 1 or more tokens at positions of 0 to 39, got 0"),
        (Chunk(TOKENS[0], 1, PAGES[0]), "got 40 at 1"),
        (Chunk(TOKENS[0, :9], 0, [0]), "chunk 0: pages: expected 2 numbers of 0 to 14"),
        (Chunk(TOKENS[0, :2], 0, [15]), "chunk 0: pages: expected 1 numbers of 0 to 14"),
        (Chunk(TOKENS[0, :2], 0, [0], 3), "chunk 0: wanted: expected 0 to 2, got 3"),
        (Chunk(np.array([WORDS]), 0, [0]), "chunk 0: tokens: expected numbers of 0 to 49"),
        (Chunk(np.zeros(81, np.int64), 0, PAGES[0]), "chunks: expected at most 80 tokens, got 81"),
    ],
)
def test_chunks_that_cannot_run(case: tuple[PastRunner, Any], wrong: Chunk, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        case[0].run([wrong])


def test_a_graph_without_past_is_refused() -> None:
    graph = lathe.load(exported_decoder(lambda name: name.replace("past_key_values", "before")).SerializeToString())
    with pytest.raises(UnsupportedError, match=r"expected a decoder with inputs past_key_values\.N\.key"):
        PastRunner(graph, vocabulary=WORDS, context=40, pages=1)
