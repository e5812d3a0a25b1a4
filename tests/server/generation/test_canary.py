"""A canary of a language model: its evidence is of whole texts, latency per token and mean log-probability."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.sampling import SamplingSettings
from lathe.server.backends.base import MemoryNeeds
from lathe.server.backends.language import TextModel, load_text_model
from lathe.server.batching.admission import Admission
from lathe.server.client import ApiError, Client
from lathe.server.generation.statistics import TextStatistics
from lathe.server.generation.texts import Texts
from lathe.server.serving.servable import Servable
from lathe.server.serving.text_outcome import TextOutcome
from lathe.server.telemetry.statistics import Statistics
from lathe.server.types import ModelRef
from tests.server.generation.tiny_model import NAME, gguf_content, serving
from tests.server.service import Service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("canary") / "repository") as running:
        with running.client() as client:
            client.push(NAME, gguf_content(seed="other"))
        yield running


@pytest.fixture
def client(server: Service) -> Iterator[Client]:
    with server.client() as made:
        yield made


def complete(server: Service, **body: Any) -> httpx.Response:
    asked = {"model": NAME, "prompt": "Hello world", "max_tokens": 4, "ignore_eos": True, **body}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60, verify=False)


def test_texts_are_evidence(server: Service, client: Client) -> None:
    client.start_canary(NAME, 2, steps=[{"weight": 0.5, "seconds": 600}])
    for seed in range(12):
        answer = complete(server, seed=seed)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["logprobs"] is None
    evidence = {each.question: each for each in client.canary(NAME).evidence}
    client.cancel_canary(NAME)
    assert set(evidence) == {"failing", "not finite", "slow (p90)", "slow (p99)", "slow (worst)", "unsure (p10)"}
    assert evidence["failing"].requests == 6
    assert evidence["failing"].candidate == evidence["not finite"].candidate == 0


def test_an_answer_is_the_same_in_a_canary(server: Service, client: Client) -> None:
    asked: dict[str, Any] = {"temperature": 0, "logprobs": 1}
    alone = complete(server, **asked).json()["choices"]
    client.start_canary(NAME, 2, weight=0.01)
    within = complete(server, **asked).json()["choices"]
    client.cancel_canary(NAME)
    assert within == alone


def test_texts_are_not_compared(client: Client) -> None:
    with pytest.raises(
        ApiError, match=r"shadow: expected 0 for a language model, whose texts are not compared, got 0.5"
    ):
        client.start_canary(NAME, 2, weight=0.5, shadow=0.5)
    with pytest.raises(ApiError, match="no canary"):
        client.canary(NAME)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(gguf_content())
    found = load_text_model(path, GeneratorOptions(1 << 20, 1), MemoryNeeds(0, 0), lambda: None)
    yield found
    found.close()


@dataclass
class Watched:
    """As much of an arm of a canary as `Texts` sees."""

    model: TextModel
    watches_texts: bool = True
    seen: list[TextOutcome] = field(default_factory=list)
    stats: Statistics = field(default_factory=lambda: Statistics(ModelRef("m", 1)))
    batcher: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(admission=Admission(10, 1 << 20)))

    def report_text(self, outcome: TextOutcome) -> None:
        self.seen.append(outcome)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_what_a_text_reports(model: TextModel, tokens: int) -> None:
    """A caller who leaves before the first token counts as a failure; a text of one token has no time per token."""
    arm = Watched(model)

    async def write() -> None:
        wanted = GenerationRequest((5, 6), SamplingSettings(temperature=0), max_tokens=max(tokens, 1))
        texts = Texts(cast(Servable, arm), [wanted], TextStatistics())
        texts.admit()
        if tokens:
            async for _ in texts.parts():
                pass
        texts.close()

    asyncio.run(write())
    (outcome,) = arm.seen
    assert outcome.failed is (tokens == 0)
    assert (outcome.token_seconds is None) == (tokens < 2)
    assert (outcome.log_probability is None) == (tokens == 0)
    assert outcome.log_probability is None or outcome.log_probability < 0
