"""Drafts change no text: right and wrong ones, by look-up and by a model, whatever else runs."""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.generation.drafting import Drafter, Drafting, DraftLength
from lathe.core.language.generation.engine import Engine
from lathe.core.language.generation.model_drafter import ModelDrafter
from lathe.core.language.generation.prompt_lookup import PromptLookup
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.generation.sequence import Sequence
from lathe.core.language.sampling import SamplingSettings
from tests.core.language.checkpoints import NEW, PROMPT
from tests.core.language.families import EXPECTED, write_folder
from tests.core.language.generation.hashed_model import VOCABULARY, alone, compute, decode
from tests.core.language.generation.recomputing_runner import RecomputingRunner
from tests.core.language.generation.test_engine import GREEDY, Text, requests

CONTEXT = 200


def runner(pages: int = 40, capacity: int = 32, vocabulary: int = VOCABULARY) -> RecomputingRunner:
    def logits(ids: Any) -> Any:
        found = compute(ids)
        return found if vocabulary >= VOCABULARY else found[..., :vocabulary]

    return RecomputingRunner(logits, vocabulary, CONTEXT, pages=pages, page_size=4, capacity=capacity)


class HalfRight:
    """Drafts whose tokens are right, or wrong, at random; `expected` are the texts by the number of the request."""

    def __init__(self, expected: dict[int, list[int]], seed: int) -> None:
        self._expected, self._rng = expected, np.random.default_rng(seed)

    def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        found = []
        for sequence, count in wanted:
            right = self._expected[id(sequence.request)][sequence.generated :][:count]
            found.append([each if self._rng.random() < 0.7 else (each + 1) % VOCABULARY for each in right])
        return found

    def release(self, sequence: Sequence) -> None: ...

    def close(self) -> None: ...


def assert_same_texts(given: Items[GenerationRequest], drafter: Drafter, **sizes: int) -> Engine:
    engine = Engine(runner(**sizes), decode, sequences=12, drafting=Drafting(drafter, 4))
    texts = [Text(engine, request) for request in given]
    for request, text in zip(given, texts, strict=True):
        end, expected = text.end(), alone(request, engine.context)
        assert text.tokens == (expected[:-1] if expected[-1] == 5 else expected)
        assert end.generated_tokens == len(expected)
    assert engine.cache_use == 0 and engine.running == engine.waiting == 0
    engine.close()
    return engine


@pytest.mark.sample(3)
@pytest.mark.parametrize(("pages", "capacity"), [(300, 64), (30, 32), (30, 5)])
def test_texts_are_those_without_drafts(pages: int, capacity: int) -> None:
    given = requests(30, pages)
    expected = {id(request): alone(request, min(CONTEXT, 4 * pages)) for request in given}

    counters = assert_same_texts(given, HalfRight(expected, pages), pages=pages, capacity=capacity).counters
    assert (counters.preemptions > 0) == (pages == 30)
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


def test_pages_of_accepted_tokens_are_found_again() -> None:
    """The keys and values of drafts that were right are those of the text; wrong ones are overwritten."""
    prompt = tuple(range(10))
    request = GenerationRequest(prompt, GREEDY, 30)
    expected = alone(request, CONTEXT)
    drafting = Drafting(HalfRight({id(request): expected}, 1), 4)
    engine = Engine(runner(), decode, drafting=drafting)
    assert Text(engine, request).tokens == expected
    again = GenerationRequest((*prompt, *expected), GREEDY, 1)
    longer = GenerationRequest(prompt, GREEDY, 31)
    drafting.close()
    text = Text(engine, again)
    assert text.tokens == alone(longer, CONTEXT)[-1:]
    assert text.end().cached_tokens == 36, "all pages that are full before the last token, which no run has computed"
    engine.close()


@pytest.mark.parametrize("drafter_pages", [300, 20])
def test_the_drafts_of_an_equal_model_are_right(drafter_pages: int) -> None:
    """Also those of samples, because both models draw with the same number; without pages there are no drafts."""
    given = [
        GenerationRequest(tuple(range(i, i + 9)), SamplingSettings(temperature=i % 2, seed=i), 24) for i in range(4)
    ]
    counters = assert_same_texts(given, ModelDrafter(runner(drafter_pages), VOCABULARY), pages=100).counters
    assert counters.accepted_tokens == counters.drafted_tokens > 0
    if drafter_pages == 300:
        assert counters.runs < 4 + 24 / 2


def test_the_drafts_of_another_model_change_nothing() -> None:
    """A draft model with fewer tokens, whose logits have another order."""

    def other(ids: Any) -> Any:
        found = compute(ids)[..., :-3]
        wrong = np.random.default_rng(0).random(CONTEXT)[: found.shape[1]] < 0.3
        return np.where(wrong[:, None], np.roll(found, 1, -1), found)

    drafter = RecomputingRunner(other, VOCABULARY - 3, CONTEXT // 2, pages=60, page_size=4, capacity=16)
    counters = assert_same_texts(requests(20, 3), ModelDrafter(drafter, VOCABULARY), pages=60).counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


def test_texts_go_on_after_a_failure_of_drafts() -> None:
    class Failing(PromptLookup):
        closed = 0

        def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
            raise ValueError("no drafts")

        def close(self) -> None:
            self.closed += 1

    drafter = Failing()
    counters = assert_same_texts(requests(3, 1), drafter).counters
    assert counters.drafted_tokens == 0 and drafter.closed == 1


def looked_up(tokens: list[int], count: int) -> list[int]:
    """What follows the last earlier occurrence of the last three, or two, tokens, by a search."""
    for size in (3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                found = list(tokens)
                for at in range(count):
                    found.append(found[end + at])
                return found[len(tokens) :]
    return []


def test_look_up_finds_the_last_repetition() -> None:
    rng, found = np.random.default_rng(0), 0
    for _ in range(50):
        tokens = rng.integers(0, 4, 40).tolist()
        sequence = Sequence(GenerationRequest(tuple(tokens[:2])), lambda part: None, decode, limit=99, arrival=0)
        lookup = PromptLookup()
        for length in range(2, 40, int(rng.integers(1, 4))):  # several tokens are new at once
            sequence.tokens = tokens[:length]
            (draft,) = lookup.draft([(sequence, 5)])
            assert draft == looked_up(tokens[:length], 5)
            found += bool(draft)
        lookup.release(sequence)
    assert found > 500


def test_drafts_become_longer_and_pause() -> None:
    length = DraftLength(8)
    found = []
    for _ in range(3):
        found.append(length.next())
        length.record(found[-1], found[-1])
    assert found == [2, 4, 8]
    length.record(length.next(), 3)
    assert length.next() == 3
    pauses = []
    for _ in range(8):
        length.record(2, 0)
        pauses.append(next(steps for steps in range(100) if length.next()))
    assert pauses == [1, 2, 4, 8, 16, 32, 32, 32]


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = lathe.load_language_model(write_folder(tmp_path, "llama"))
    expected = EXPECTED["llama/tokens"].tolist()[len(PROMPT) :]
    drafts = [PromptLookup(), ModelDrafter(CachedDecoder(model, pages=16, threads=1), model.settings.vocabulary)]
    for drafter in drafts:
        decoder = CachedDecoder(model, pages=16, page_size=8, threads=1)
        engine = Engine(decoder, decode, drafting=Drafting(drafter, 4))
        texts = [Text(engine, GenerationRequest(tuple(PROMPT), GREEDY, NEW)) for _ in range(2)]
        assert [text.tokens for text in texts] == [expected, expected]
        counters = engine.counters
        if isinstance(drafter, ModelDrafter):
            assert counters.accepted_tokens == counters.drafted_tokens > NEW
        engine.close()
