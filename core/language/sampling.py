"""Chooses the next token from logits: penalties, temperature, top-k, top-p, min-p, a seed, log-probabilities.

Each choice depends on one row of logits, the settings, the tokens so far and the position. So it is the same in every
batch. The order of the steps is that of the library Transformers: bias, penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError

Logits = NDArray[np.float32]
Tokens = NDArray[np.int64]

_WORD = (1 << 64) - 1
# Weights relative to the largest one. Most rows have all tokens that matter above the first cut, so a few dozen tokens
# are sorted instead of the vocabulary. The last cut takes all tokens that have any weight.
_CUTS = (1e-2, 1e-4, 1e-7, 0.0)


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen.

    `temperature`: 0 takes the best token. `top_k`: from this many of the best tokens; 0 for all. `top_p`: from the
    fewest tokens whose probabilities sum to at least this (Holtzman et al., 2020). `min_p`: from tokens of at least
    this share of the best token's probability (Nguyen et al., 2024). `repetition_penalty` divides positive logits of
    all tokens so far, and multiplies negative ones (Keskar et al., 2019). `presence_penalty` and `frequency_penalty`
    are subtracted from the logits of generated tokens, once and per occurrence. `bias` is added to the logits of
    tokens. `seed` decides all random numbers. `logprobs`: the number of alternatives with log-probabilities; None for
    no log-probabilities at all. FeedError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        infinite = float("inf")
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_k", 0, _WORD),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            found = getattr(self, name)
            if not low <= found <= high:
                raise FeedError(f"{name}: expected a number from {low:g} to {high:g}, got {found}")
        if not 0 < self.repetition_penalty < infinite:
            raise FeedError(f"repetition_penalty: expected a positive number, got {self.repetition_penalty}")
        if self.logprobs is not None and self.logprobs < 0:
            raise FeedError(f"logprobs: expected at least 0, got {self.logprobs}")


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token. `logprob` and `alternatives`, pairs of token and log-probability, the best first, are those of
    the model: before penalties and temperature. Without `SamplingSettings.logprobs` they are None and empty.
    """

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence, one after the other."""

    def __init__(self, settings: SamplingSettings, prompt: Sequence[int] = ()) -> None:
        self._settings = settings
        self._seen = set(prompt) if settings.repetition_penalty != 1 else set()
        self._generated: Counter[int] = Counter()

    def choose(self, logits: Logits, position: int, allowed: NDArray[np.bool_] | None = None) -> Choice:
        """The token after `position` tokens, from its logits [vocabulary].

        `allowed` [vocabulary]: other tokens are not chosen. FeedError if no token is left, or if logits are not
        numbers.
        """
        settings = self._settings
        scores = self.adjusted(logits)
        if allowed is not None:
            scores = np.where(allowed, scores, np.float32(-np.inf))
        if settings.temperature == 0:
            token = int(scores.argmax())
        else:
            token = _drawn(scores, settings, uniform(settings.seed, position))
        if not np.isfinite(scores[token]):
            raise FeedError("no token can be chosen: all logits are infinite or not numbers")
        if settings.logprobs is None:
            return Choice(token)
        return _with_logprobs(token, logits, settings.logprobs)

    def record(self, token: int) -> None:
        """Note that the sequence has this token now."""
        settings = self._settings
        if settings.repetition_penalty != 1:
            self._seen.add(token)
        if settings.presence_penalty or settings.frequency_penalty:
            self._generated[token] += 1

    def adjusted(self, logits: Logits) -> Logits:
        """The logits after bias and penalties; the same array if there are none."""
        settings = self._settings
        if not (settings.bias or self._seen or self._generated):
            return logits
        scores = logits.copy()
        if settings.bias:
            scores[_tokens(settings.bias)] += np.fromiter(settings.bias.values(), np.float32)
        if self._seen:
            seen = _tokens(self._seen)
            found, penalty = scores[seen], np.float32(settings.repetition_penalty)
            scores[seen] = np.where(found < 0, found * penalty, found / penalty)
        if self._generated:
            counts = np.fromiter(self._generated.values(), np.float32)
            scores[_tokens(self._generated)] -= settings.presence_penalty + settings.frequency_penalty * counts
        return scores


def _tokens(found: Mapping[int, float] | set[int]) -> Tokens:
    return np.fromiter(found, np.int64, len(found))


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) that depends on these two numbers only (SplitMix64: Steele et al., 2014)."""
    return (_mixed(_mixed(seed & _WORD) + position + 1) >> 11) / (1 << 53)


def random_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(63)


def seed_of_choice(seed: int, index: int) -> int:
    """The seed of one of several answers to a request with this seed; for the first answer the seed itself."""
    return seed if index == 0 else _mixed(_mixed(seed & _WORD) ^ index)


def _mixed(number: int) -> int:
    z = (number + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _WORD
    return z ^ z >> 31


def candidates(scores: Logits, settings: SamplingSettings) -> tuple[Tokens, NDArray[np.float64]]:
    """The tokens that may be drawn with these scores [vocabulary], and their probabilities.

    In ascending order of tokens if top-k and top-p do not limit them, otherwise the most probable first.
    """
    best = scores.max()
    weights = np.exp((scores - best) / np.float32(settings.temperature))
    top_k, limited = settings.top_k, settings.top_p < 1
    if 0 < top_k < len(weights):
        tokens = _largest(weights, lambda found: len(found) >= top_k)[:top_k]
    elif limited:
        wanted = settings.top_p * float(weights.sum(dtype=np.float64))
        tokens = _largest(weights, lambda found: float(weights[found].sum(dtype=np.float64)) >= wanted)
    else:
        tokens = np.flatnonzero(weights > 0)
    masses = weights[tokens].astype(np.float64)
    if limited:
        total = masses.sum() if 0 < top_k < len(weights) else float(weights.sum(dtype=np.float64))
        before = np.cumsum(masses) - masses
        count = max(int(np.count_nonzero(before < settings.top_p * total)), 1)
        tokens, masses = tokens[:count], masses[:count]
    if settings.min_p > 0:
        kept = masses >= settings.min_p * masses.max()
        tokens, masses = tokens[kept], masses[kept]
    return tokens, masses / masses.sum()


def _largest(weights: Logits, enough: Callable[[Tokens], bool]) -> Tokens:
    """The tokens of the largest weights in descending order; equal weights in ascending order of tokens.

    At least as many as are `enough`, or all that have a weight.
    """
    tokens = np.arange(0)
    for cut in _CUTS:
        tokens = np.flatnonzero(weights > cut)
        if enough(tokens):
            break
    return tokens[np.argsort(-weights[tokens], kind="stable")]


def _drawn(scores: Logits, settings: SamplingSettings, number: float) -> int:
    """The token at `number` of the cumulative distribution."""
    if not np.isfinite(scores.max()):
        return int(scores.argmax())
    tokens, probabilities = candidates(scores, settings)
    at = int(np.searchsorted(np.cumsum(probabilities), number, side="right"))
    return int(tokens[min(at, len(tokens) - 1)])


def _with_logprobs(token: int, logits: Logits, count: int) -> Choice:
    logprobs = log_softmax(logits)
    best = np.argpartition(-logprobs, min(count, len(logprobs) - 1))[:count] if count else np.arange(0)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    return Choice(token, float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in best))


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Log-probabilities of logits [vocabulary], computed in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())
