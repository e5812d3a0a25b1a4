"""T5, mT5 and Whisper over a cache: Transformers' tokens, any mix of chunks and sources, nothing compiled later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.compiler import pipeline
from lathe.core.errors import FeedError
from lathe.core.language.encoder_decoder_runner import EncoderDecoderRunner
from lathe.core.language.generation.generator import TextGenerator
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.sampling import SamplingSettings
from lathe.core.language.source import Source
from lathe.core.language.token_runner import Chunk
from tests.core.language.encoder_decoders import BEGIN, CHECKPOINTS, NEW, TARGET, source
from tests.core.language.test_encoder_decoders import EXPECTED, write_folder
from tests.core.language.test_tokenizer import trained

PAGES = [[3, 9, 0, 7, 5], [1, 8, 2, 6, 4]]
_SLOW = ("t5-gated", "mt5-untied")


def runner_of(folder: Path, name: str) -> EncoderDecoderRunner:
    model = lathe.load_encoder_decoder(write_folder(folder, name))
    return EncoderDecoderRunner(model, pages=10, page_size=16, capacity=64, threads=1)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> EncoderDecoderRunner:
    return runner_of(tmp_path_factory.mktemp("t5"), "t5")


def sources(name: str) -> list[Source]:
    return [Source(row) for row in source(name)[1]]


def chunk(given: Source, row: int, start: int, stop: int, wanted: int | None = None) -> Chunk:
    return Chunk(TARGET[row, start:stop], start, PAGES[row], stop - start if wanted is None else wanted, source=given)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4 * np.abs(expected).max())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in _SLOW else each for each in CHECKPOINTS]
)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Those of Whisper also after a prompt of several tokens. Nothing is compiled for a length."""
    runner, given = runner_of(tmp_path, name), sources(name)
    logits = EXPECTED[f"{name}/logits"]
    assert_close(runner.run([chunk(given[row], row, 0, 13) for row in range(2)]), np.concatenate(logits))
    start = EXPECTED[f"{name}/tokens"][:1].tolist()
    for row, (kind, tokens) in enumerate([("tokens", start), ("prompted", list(BEGIN))][: 1 + (name == "whisper")]):
        found = runner.run([Chunk(np.array(tokens), 0, PAGES[row], 1, source=given[row])])
        for _ in range(NEW):
            tokens.append(int(found[0].argmax()))
            found = runner.run([Chunk(np.array(tokens[-1:]), len(tokens) - 1, PAGES[row], 1, source=given[row])])
        assert tokens == EXPECTED[f"{name}/{kind}"].tolist()
    for session in (runner._encoder, runner._decoder):
        assert "0 on the reference" in session.explain()
    for session in (runner._encoder, runner._decoder)[name == "whisper" :]:  # the source of Whisper has one shape
        assert not session._shapes.cached_runners(), "dynamic-shape code serves every length"
    runner.close()


def test_chunks_of_any_lengths_share_a_run(t5: EncoderDecoderRunner) -> None:
    given, logits = sources("t5"), EXPECTED["t5/logits"]
    first = t5.run([chunk(given[0], 0, 0, 5, 1), chunk(given[1], 1, 0, 9, 0)])
    assert_close(first, logits[0, 4:5])
    second = t5.run([chunk(given[1], 1, 9, 10), chunk(given[0], 0, 5, 13)])
    assert_close(second, np.concatenate([logits[1, 9:10], logits[0, 5:]]))


def test_a_source_is_encoded_once(t5: EncoderDecoderRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    given, calls = sources("t5")[0], []
    encode = t5._encoder.run
    monkeypatch.setattr(t5._encoder, "run", lambda feeds: calls.append(1) or encode(feeds))
    for at in range(4):
        t5.run([chunk(given, 0, at, at + 1)])
    assert len(calls) == 1


def test_nothing_is_compiled_after_loading(t5: EncoderDecoderRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(pipeline, "build", lambda *arguments: calls.append(arguments))
    for length in range(1, 60, 7):
        given = Source(np.full(length, 5))
        t5.run([Chunk(np.full(length, 7), 0, PAGES[0], 1, source=given)])
        t5.run([Chunk(np.full(1, 7), length, PAGES[0], 1, source=given)])
    assert not calls


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "chunk 0: expected a source"),
        (Source(np.zeros(0, np.int64)), r"source: expected int64 \[length\], got int64 \[0\]"),
        (Source(np.zeros((1, 3), np.int64)), r"source: expected int64 \[length\], got int64 \[1, 3\]"),
        (Source(np.zeros(3, np.float32)), r"source: expected int64 \[length\], got float32 \[3\]"),
        (Source(np.array([97])), "source: expected tokens of 0 to 96"),
    ],
)
def test_sources_that_do_not_fit(t5: EncoderDecoderRunner, given: Any, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        t5.run([Chunk(np.zeros(1, np.int64), 0, PAGES[0], 1, source=given)])


def test_equal_sources_have_equal_keys() -> None:
    one, other = np.arange(6), np.arange(6).reshape(2, 3)
    assert Source(one).key == Source(one.copy()).key
    assert len({Source(one).key, Source(other).key, Source(one.astype(np.float32)).key, Source(one[:5]).key}) == 4


def test_texts_of_the_engine_are_those_of_their_own_sources(tmp_path: Path) -> None:
    """The beginnings of texts are shared only between texts of equal sources, however many run at once."""
    folder = write_folder(tmp_path, "mt5")
    trained().save(str(folder / "tokenizer.json"))
    generator = TextGenerator.open(folder, GeneratorOptions(cache_bytes=1 << 20, threads=1))
    prompts = [tuple(row.tolist()) for row in source("mt5")[1]]
    expected = EXPECTED["mt5/tokens"][1:61].tolist()

    def tokens(prompt: tuple[int, ...]) -> list[int]:
        request = GenerationRequest(prompt, SamplingSettings(temperature=0), max_tokens=60)
        return [choice.token for part in generator.engine.generate(request) for choice in part.choices]

    with ThreadPoolExecutor(4) as pool:
        one, other, again, third = pool.map(tokens, [*prompts, *prompts])
    assert one == again == expected
    assert other == third
    assert other != one
    assert tokens(prompts[0]) == expected
    assert generator.engine.cache_use == 0
    generator.close()
