"""Whisper transcribes: the tokens of Transformers' `generate`, which `make_speech.py` records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import FeedError, ModelError
from lathe.core.language.generation.generator import TextGenerator, memory_bytes, sequence_count
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.sampling import SamplingSettings
from lathe.core.language.token_filter import MaskedTokens
from lathe.core.language.transcriber import Transcriber
from tests.core.language.speech import CASES, GENERATION, RATE, SOUNDS, sound, write_speech

EXPECTED = np.load(Path(__file__).parent / "speech.npz")
GREEDY = SamplingSettings(temperature=0)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextGenerator]:
    folder = write_speech(tmp_path_factory.mktemp("speech"))
    opened = TextGenerator.open(folder, GeneratorOptions(cache_bytes=1 << 20, threads=1))
    yield opened
    opened.close()


@pytest.fixture
def transcriber(generator: TextGenerator) -> Transcriber:
    assert generator.transcriber is not None
    return generator.transcriber


def tokens(generator: TextGenerator, request: GenerationRequest) -> list[int]:
    return [choice.token for part in generator.engine.generate(request) for choice in part.choices]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(generator: TextGenerator, transcriber: Transcriber, name: str) -> None:
    number, language, before = CASES[name]
    source = transcriber.source(sound(number))
    if language is None:
        (token,) = tokens(generator, transcriber.detection(source))
        language = transcriber.language_of(token)
    expected = EXPECTED[f"{name}/tokens"].tolist()
    assert tokens(generator, transcriber.request(source, language, before, GREEDY)) == expected


def test_languages_are_those_of_transformers(generator: TextGenerator, transcriber: Transcriber) -> None:
    found = [tokens(generator, transcriber.detection(transcriber.source(sound(number)))) for number in range(SOUNDS)]
    assert [[token] for token in EXPECTED["languages"]] == found
    assert len(set(EXPECTED["languages"].tolist())) == 2


def test_long_sound_is_cut_where_it_is_quiet(transcriber: Transcriber) -> None:
    """The model takes one second. Each second has a gap at 0.93 s, then noise."""
    long = np.random.default_rng(0).normal(0, 0.1, int(2.5 * RATE)).astype(np.float32)
    for at in (0.93, 0.93 + 0.95):
        long[int((at - 0.01) * RATE) : int((at + 0.01) * RATE)] = 0
    pieces = list(transcriber.pieces(long))
    np.testing.assert_array_equal(np.concatenate(pieces), long)
    np.testing.assert_allclose([len(piece) / RATE for piece in pieces[:2]], [0.93, 0.95], 0, 0.012)
    assert len(pieces) == 3
    assert [len(piece) for piece in transcriber.pieces(long[:RATE])] == [RATE]
    assert [len(piece) for piece in transcriber.pieces(long[:0])] == [0]


@pytest.mark.parametrize("language", ["xx", "", "<|en|>"])
def test_unknown_languages(transcriber: Transcriber, language: str) -> None:
    with pytest.raises(FeedError, match=r"language: expected one of de, en, got"):
        transcriber.request(transcriber.source(sound(0)), language, "", GREEDY)


def test_a_long_prompt_loses_its_beginning(transcriber: Transcriber) -> None:
    request = transcriber.request(transcriber.source(sound(0)), "en", "x" * 90 + "end", GREEDY)
    assert request.prompt[1:-4] == tuple(b"x" * 31 + b"end"), "fewer than half of the 70 positions"


def test_prompts_without_sound_are_refused(generator: TextGenerator) -> None:
    with pytest.raises(FeedError, match="transcribes sound, and answers no prompts"):
        generator.engine.submit(GenerationRequest((5,)), lambda part: None)


def test_memory_bounds_the_texts_that_run_at_once(generator: TextGenerator, tmp_path: Path) -> None:
    """A text has 50 positions of sound and at most 96 of text, in 2 layers of 48 numbers for keys and for values."""
    folder, text = write_speech(tmp_path), 2 * 2 * 48 * 4 * (50 + 96)
    for count in (1, 3):
        assert sequence_count(generator.model, GeneratorOptions(cache_bytes=count * text + 5)) == count
    few = memory_bytes(folder, GeneratorOptions(cache_bytes=1))
    assert few == memory_bytes(folder, GeneratorOptions(cache_bytes=text))
    assert memory_bytes(folder, GeneratorOptions(cache_bytes=text + 7)) == few + 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_timestamps_token_id": None}, "no_timestamps_token_id: expected a token of 0 to 299, got nothing"),
        ({"lang_to_id": None}, "lang_to_id: expected an object of tokens, got nothing"),
        ({"lang_to_id": {"<|en|>": 300}}, "lang_to_id: expected a token of 0 to 299, got 300"),
        ({"task_to_id": {}}, "task_to_id: expected the token of 'transcribe'"),
        ({"suppress_tokens": "x"}, 'suppress_tokens: expected a list of tokens, got "x"'),
    ],
)
def test_damaged_settings(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_speech(tmp_path)
    fields = {key: each for key, each in (GENERATION | change).items() if each is not None}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        TextGenerator.open(folder)


def test_a_model_of_english_only(tmp_path: Path) -> None:
    folder = write_speech(tmp_path)
    fields = {key: each for key, each in GENERATION.items() if key not in ("lang_to_id", "task_to_id")}
    (folder / "generation_config.json").write_text(json.dumps({**fields, "is_multilingual": False}))
    opened = TextGenerator.open(folder, GeneratorOptions(cache_bytes=1 << 20, threads=1))
    assert opened.transcriber is not None
    source = opened.transcriber.source(sound(0))
    start, plain = 257, GENERATION["no_timestamps_token_id"]
    for language in ("en", None):
        assert opened.transcriber.request(source, language, "", GREEDY).prompt == (start, plain)
    with pytest.raises(FeedError, match="language: expected one of en, got 'de'"):
        opened.transcriber.request(source, "de", "", GREEDY)
    opened.close()


def test_masks_of_tokens() -> None:
    mask = MaskedTokens(6, [2, 9], [3])
    assert mask.allowed().tolist() == [True, True, False, False, True, True]
    assert [mask.count_allowed(tokens) for tokens in ([3], [0, 3, 2, 1], [0, 3, 5])] == [0, 2, 3]
    mask.accept(0)
    assert mask.allowed().tolist() == [True, True, False, True, True, True]
    assert mask.count_allowed([3, 2]) == 1
