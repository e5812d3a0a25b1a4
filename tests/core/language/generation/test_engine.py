"""The engine: every text is the one that its request gets alone, whatever else runs; pages, priorities, ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.language.generation.engine import Closed, Engine
from lathe.core.language.generation.request import End, GenerationRequest, Progress
from lathe.core.language.sampling import SamplingSettings
from lathe.core.language.token_runner import Chunk
from tests.core.language.checkpoints import NEW, PROMPT
from tests.core.language.families import EXPECTED, write_folder
from tests.core.language.generation.hashed_model import VOCABULARY, alone, decode, runner
from tests.core.language.generation.recomputing_runner import RecomputingRunner, recomputing_runner

GREEDY = SamplingSettings(temperature=0)


class Text:
    """The parts of one text."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self.parts: list[Progress] = []
        self.done, self.began = threading.Event(), threading.Event()
        self.cancel = engine.submit(request, self._take)

    def _take(self, part: Progress) -> None:
        self.parts.append(part)
        self.began.set()
        if part.end is not None:
            self.done.set()

    def end(self) -> End:
        assert self.done.wait(20)
        (end,) = [part.end for part in self.parts if part.end is not None]
        assert self.parts[-1].end is end
        return end

    @property
    def text(self) -> str:
        self.end()
        return "".join(part.text for part in self.parts)

    @property
    def tokens(self) -> list[int]:
        self.end()
        return [choice.token for part in self.parts for choice in part.choices]


def wait_until(condition: Any) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


class Gate(RecomputingRunner):
    """A runner that waits before each run until it is let through, and notes the runs."""

    def __init__(self, **sizes: Any) -> None:
        inner = runner(**sizes)
        self.__dict__.update(inner.__dict__)
        self.runs: list[list[Chunk]] = []
        self._permits = threading.Semaphore(0)
        self.open = False

    def run(self, chunks: Sequence[Chunk]) -> Any:
        if not self.open:
            assert self._permits.acquire(timeout=20)
        self.runs.append(list(chunks))
        return super().run(chunks)

    def permit(self, count: int = 1) -> None:
        self._permits.release(count)


def requests(count: int, seed: int) -> list[GenerationRequest]:
    """Requests of all kinds, some of which begin with the same text."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, 30).tolist()
    return [
        GenerationRequest(
            prompt=(*shared[: int(rng.choice([0, 9, 30]))], *rng.integers(0, VOCABULARY, rng.integers(1, 40)).tolist()),
            sampling=SamplingSettings(
                temperature=float(rng.choice([0, 1])), top_p=0.9, seed=index, presence_penalty=float(rng.choice([0, 1]))
            ),
            max_tokens=int(rng.integers(1, 40)),
            end_tokens=frozenset([5]),
            priority=int(rng.integers(0, 2)),
            client=str(rng.integers(0, 3)),
        )
        for index in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("pages", "capacity"), [(300, 64), (30, 32), (30, 5)])
def test_texts_are_those_of_the_requests_alone(pages: int, capacity: int) -> None:
    """Texts come and go at random; some are cancelled."""
    rng, engine = np.random.default_rng(pages), Engine(runner(pages=pages, capacity=capacity), decode, sequences=12)
    texts = []
    for number, request in enumerate(requests(60, pages)):
        texts.append((request, Text(engine, request), number % 7 == 3))
        if number % 7 == 3:
            texts[-1][1].cancel()
        if rng.random() < 0.3:
            time.sleep(0.002)
    for request, text, cancelled in texts:
        end, expected = text.end(), alone(request, engine.context)
        if cancelled and end.reason == "cancelled":
            assert expected[: len(text.tokens)] == text.tokens
            continue
        ended = expected[-1] == 5
        assert text.tokens == (expected[:-1] if ended else expected)
        assert text.text == decode(text.tokens)
        assert end.reason == ("stop" if ended else "length")
        assert end.generated_tokens == len(expected) and end.prompt_tokens == len(request.prompt)
    assert engine.cache_use == 0 and engine.running == engine.waiting == 0
    counters = engine.counters
    assert (counters.preemptions > 0) == (pages == 30), counters
    assert counters.cached_tokens > 0
    engine.close()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = lathe.load_language_model(write_folder(tmp_path, name))
    engine = Engine(recomputing_runner(model, pages=40, page_size=4, threads=1), decode)
    texts = [
        Text(engine, GenerationRequest(tuple(PROMPT), GREEDY, NEW if number % 2 else NEW // 2)) for number in range(4)
    ]
    expected = EXPECTED[f"{name}/tokens"].tolist()[len(PROMPT) :]
    assert [text.tokens for text in texts] == [expected[: NEW // 2], expected] * 2
    engine.close()


def test_a_run_has_tokens_of_texts_and_parts_of_prompts() -> None:
    gate = Gate(capacity=16)
    engine = Engine(gate, decode, prompt_tokens=6)
    first = Text(engine, GenerationRequest((1, 2, 3), GREEDY, 12))
    gate.permit()
    first.began.wait(10)
    second = Text(engine, GenerationRequest(tuple(range(40)), GREEDY, 2))
    wait_until(lambda: engine.waiting + engine.running == 2 or gate.permit())
    gate.permit(100)
    assert first.end() and second.end()
    assert [[len(chunk.tokens) for chunk in run] for run in gate.runs if len(run) == 2][:3] == [[1, 6]] * 3
    assert all(sum(len(chunk.tokens) for chunk in run) <= 16 for run in gate.runs)
    assert sum(chunk.wanted for run in gate.runs for chunk in run) == 14, "only ends of prompts and tokens have logits"
    engine.close()


def test_a_cancelled_text_frees_its_pages_at_once() -> None:
    gate = Gate()
    engine = Engine(gate, decode)
    texts = [Text(engine, GenerationRequest((token,) * 20, GREEDY, 100)) for token in (1, 2)]
    gate.permit(3)
    assert texts[0].began.wait(10)
    used = engine.cache_use
    texts[0].cancel()
    gate.permit()
    assert texts[0].end().reason == "cancelled"
    assert 0 < engine.cache_use < used * 0.6 and engine.running == 1
    texts[0].cancel()  # has no effect
    gate.open = True
    gate.permit()
    texts[1].end()
    engine.close()


def test_a_prompt_that_was_computed_before_is_found() -> None:
    engine = Engine(runner(), decode)
    prompt = tuple(range(30))
    first = Text(engine, GenerationRequest(prompt, GREEDY, 3))
    assert first.end().cached_tokens == 0
    assert Text(engine, GenerationRequest((*prompt, 9), GREEDY, 3)).end().cached_tokens == 28
    again = Text(engine, GenerationRequest(prompt, GREEDY, 3))
    assert again.end().cached_tokens == 28 and again.tokens == first.tokens
    assert Text(engine, GenerationRequest((1, *prompt), GREEDY, 3)).end().cached_tokens == 0
    assert engine.counters.prompt_tokens == 30 + 3 + 2 + 31
    engine.close()


def test_texts_with_one_prompt_compute_it_once() -> None:
    """Also if they come together: the others wait for the first one's pages."""
    gate = Gate(capacity=8)
    engine = Engine(gate, decode)
    texts = [Text(engine, GenerationRequest(tuple(range(33)), SamplingSettings(seed=seed), 4)) for seed in range(4)]
    gate.open = True
    gate.permit()
    assert sorted(text.end().cached_tokens for text in texts) == [0, 32, 32, 32]
    assert len({tuple(text.tokens) for text in texts}) == 4
    engine.close()


def test_higher_priorities_go_first_and_take_pages() -> None:
    gate = Gate(pages=12)
    engine = Engine(gate, decode)
    low = Text(engine, GenerationRequest(tuple(range(30)), GREEDY, 10))
    gate.permit(2)
    assert low.began.wait(10)
    high = Text(engine, GenerationRequest(tuple(range(1, 31)), GREEDY, 10, priority=1))
    gate.open = True
    gate.permit()
    assert high.end() and low.end().reason == "length"
    assert engine.counters.preemptions >= 1
    order = [chunk.position for run in gate.runs for chunk in run]
    assert order.count(0) >= 2
    engine.close()


def test_clients_get_equal_shares() -> None:
    """One client has queued many texts; another one's text does not wait for all of them."""
    gate = Gate(pages=24)
    engine = Engine(gate, decode, sequences=2)
    ends: list[str] = []

    def begin(first: int, client: str) -> None:
        request = GenerationRequest((first, 1, 2), GREEDY, 20, client=client)
        engine.submit(request, lambda part: ends.append(client) if part.end is not None else None)

    for number in range(10):
        begin(number, "a")
    begin(60, "b")
    gate.open = True
    gate.permit()
    wait_until(lambda: len(ends) == 11)
    assert ends.index("b") <= 4
    engine.close()


def test_stop_strings_and_limits() -> None:
    engine = Engine(runner(), decode)
    request = GenerationRequest((1, 2, 3), GREEDY, 30)
    whole = Text(engine, request).text
    stopped = Text(engine, GenerationRequest((1, 2, 3), GREEDY, 30, stops=(whole[7:10],)))
    assert stopped.text == whole[: whole.find(whole[7:10])]
    assert stopped.end().reason == "stop" and stopped.end().stop == whole[7:10]
    last = Text(engine, GenerationRequest((1, 2, 3), GREEDY, 30, stops=(whole[-1] + "never",)))
    assert last.text == whole, "text that was held back is released at the end"
    full = Text(engine, GenerationRequest((1,) * 150, GREEDY))
    assert full.end().reason == "length" and full.end().generated_tokens == engine.context - 150
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ((), {}, "at least one token"), ((1,) * 160, {}, "fewer than 160 tokens, got 160"), ((64,), {}, "0 to 63"),
        ((-1,), {}, "0 to 63"), ((1,), {"max_tokens": 0}, "max_tokens"),
        ((1,), {"sampling": SamplingSettings(bias={64: 1.0})}, "logit_bias"),
    ],
)  # fmt: skip
def test_impossible_requests_are_refused(prompt: tuple[int, ...], more: Any, message: str) -> None:
    engine = Engine(runner(), decode)
    with pytest.raises(FeedError, match=message):
        engine.submit(GenerationRequest(prompt, **more), lambda part: None)
    engine.close()


def test_a_run_that_raises_ends_its_texts_and_no_others() -> None:
    class Failing(Gate):
        def run(self, chunks: Sequence[Chunk]) -> Any:
            if any(13 in chunk.tokens for chunk in chunks):
                raise FeedError("a node refuses 13")
            return super().run(chunks)

    gate = Failing(capacity=4)
    gate.open = True
    engine = Engine(gate, decode)
    with pytest.raises(FeedError, match="refuses 13"):
        list(engine.generate(GenerationRequest((13,), GREEDY, 5)))
    request = GenerationRequest((1, 2), GREEDY, 8)
    if 13 not in (expected := alone(request, engine.context)):
        assert Text(engine, request).tokens == expected
    assert engine.cache_use == 0
    engine.close()


def test_an_error_of_one_text_does_not_stop_the_others() -> None:
    def fragile(tokens: Sequence[int]) -> str:
        if list(tokens) == [9, 9]:
            raise ValueError("the tokenizer fails")
        return decode(tokens)

    engine = Engine(runner(), fragile)
    same = SamplingSettings(temperature=0, bias={9: 1000.0})
    good = Text(engine, GenerationRequest((1, 2, 3), GREEDY, 20))
    bad = Text(engine, GenerationRequest((9,), same, 20))
    assert str(bad.end().error) == "the tokenizer fails" and good.end().reason == "length"

    def failing(part: Progress) -> None:
        raise ValueError("the caller fails")

    engine.submit(GenerationRequest((1,), GREEDY, 3), failing)
    assert Text(engine, GenerationRequest((1, 2, 3), GREEDY, 20)).tokens == good.tokens
    assert engine.cache_use == 0
    engine.close()


def test_closing_ends_texts_and_refuses_new_ones() -> None:
    gate = Gate()
    engine = Engine(gate, decode)
    running, waiting = (Text(engine, GenerationRequest((token,), GREEDY, 100)) for token in (1, 2))
    gate.open = True
    gate.permit()
    engine.close()
    assert isinstance(running.end().error, Closed | type(None)) and waiting.done.is_set()
    with pytest.raises(Closed):
        engine.submit(GenerationRequest((1,)), lambda part: None)


def test_a_closed_iterator_cancels_its_text() -> None:
    engine = Engine(runner(), decode)
    parts = engine.generate(GenerationRequest((1, 2), GREEDY, 100))
    assert next(parts).text
    parts.close()
    wait_until(lambda: engine.running == 0)
    assert engine.cache_use == 0
    engine.close()
