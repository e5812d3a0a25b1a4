"""Sampling gives the distributions of Transformers' logits processors, and depends on seed and position alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import FeedError
from lathe.core.language.sampling import Sampler, SamplingSettings, candidates, seed_of_choice, uniform

RECORDED = np.load(Path(__file__).with_name("sampling.npz"))
CASES = json.loads(str(RECORDED["cases"]))


def settings_of(case: dict[str, Any], **more: Any) -> SamplingSettings:
    bias = {int(token): value for token, value in case.get("bias", {}).items()}
    return SamplingSettings(**{**case, "bias": bias, **more})


def distribution(logits: Any, settings: SamplingSettings, prompt: Any = ()) -> Any:
    """The probabilities of all tokens, as the sampler draws from them."""
    tokens, probabilities = candidates(Sampler(settings, prompt).adjusted(logits), settings)
    found = np.zeros(len(logits))
    found[tokens] = probabilities
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: "-".join(CASES[index]) or "plain")
def test_distributions_are_those_of_transformers(index: int) -> None:
    found = distribution(RECORDED["logits"][index], settings_of(CASES[index]), RECORDED["prompt"].tolist())
    np.testing.assert_allclose(found, RECORDED["probabilities"][index], rtol=1e-5, atol=1e-9)
    assert np.count_nonzero(found) == np.count_nonzero(RECORDED["probabilities"][index])


def test_the_draws_follow_the_distribution() -> None:
    logits = RECORDED["logits"][0][:40]
    settings = SamplingSettings(temperature=1.2, top_k=12, seed=9)
    sampler = Sampler(settings)
    drawn = np.bincount([sampler.choose(logits, position).token for position in range(4000)], minlength=40)
    expected = distribution(logits, settings) * 4000
    assert not drawn[expected == 0].any()
    chosen = expected > 0
    statistic = float(((drawn - expected)[chosen] ** 2 / expected[chosen]).sum())  # chi-squared, 11 degrees of freedom
    assert 2.6 < statistic < 31.3  # 99% below the first bound are larger, 99.9% below the second


def test_random_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(500)] for seed in (0, 1, -1, 1 << 70)])
    assert len(np.unique(numbers)) == numbers.size or (uniform(0, 3) == uniform(1 << 64, 3))
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(np.corrcoef(numbers[:3])[np.triu_indices(3, 1)]).max() < 0.15
    counts = np.histogram(numbers[:3], 10, (0, 1))[0]
    assert counts.min() > 105 and counts.max() < 195


def test_answers_of_one_request_have_different_seeds() -> None:
    seeds = [seed_of_choice(7, index) for index in range(100)]
    assert seeds[0] == 7 and len(set(seeds)) == 100


def test_a_temperature_of_zero_takes_the_best_token() -> None:
    logits = RECORDED["logits"][3]
    assert Sampler(SamplingSettings(temperature=0, seed=3)).choose(logits, 5).token == logits.argmax()


def test_presence_and_frequency_penalties_count_generated_tokens() -> None:
    """The formula of OpenAI's documentation: logits - count * frequency - (count > 0) * presence."""
    logits, settings = RECORDED["logits"][0], SamplingSettings(presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(settings, prompt=[1, 2, 3])
    counts = np.zeros(len(logits))
    for token in (4, 4, 9, 4):
        sampler.record(token)
        counts[token] += 1
    expected = logits - 0.25 * counts - 0.5 * (counts > 0)
    np.testing.assert_allclose(sampler.adjusted(logits), expected, rtol=1e-6)


def test_logprobs_are_those_of_the_model() -> None:
    logits = RECORDED["logits"][0]
    choice = Sampler(SamplingSettings(temperature=0, bias={7: 100.0}, logprobs=4)).choose(logits, 0)
    exact = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    assert choice.token == 7 and choice.logprob == pytest.approx(exact[7])
    best = np.argsort(-exact)[:4]
    assert [token for token, _ in choice.alternatives] == best.tolist()
    np.testing.assert_allclose([value for _, value in choice.alternatives], exact[best])


def test_only_allowed_tokens_are_chosen() -> None:
    logits = RECORDED["logits"][0]
    allowed = np.zeros(len(logits), bool)
    allowed[[11, 12]] = True
    sampler = Sampler(SamplingSettings(top_p=0.9))
    assert {sampler.choose(logits, position, allowed).token for position in range(40)} <= {11, 12}
    with pytest.raises(FeedError, match="no token can be chosen"):
        sampler.choose(logits, 0, np.zeros(len(logits), bool))


def test_logits_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(FeedError, match="not numbers"):
        Sampler(SamplingSettings()).choose(np.full(5, np.nan, np.float32), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_p", 1.5), ("min_p", -0.1), ("top_k", -1), ("repetition_penalty", 0), ("logprobs", -1)],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(FeedError, match=name):
        SamplingSettings(**{name: value})
