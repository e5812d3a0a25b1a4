"""A model whose logits depend on every token of the text: any wrong, missing or exchanged token changes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.sampling import Sampler
from tests.core.language.generation.recomputing_runner import RecomputingRunner

VOCABULARY = 64


def row(tokens: Sequence[int]) -> Any:
    """Logits [vocabulary] after these tokens."""
    digest = 7
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % (1 << 61)
    return np.random.default_rng(digest).normal(0, 2, VOCABULARY).astype(np.float32)


def compute(ids: Any) -> Any:
    tokens = ids[0].tolist()
    return np.stack([row(tokens[: end + 1]) for end in range(len(tokens))])[None]


class LastRows:
    """`compute` for the last position alone, which is all that the engine asks for."""

    def __getitem__(self, _index: Any) -> Any:
        return self

    def __init__(self, ids: Any) -> None:
        self._tokens = ids[0].tolist()

    def __array__(self, *_: Any, **__: Any) -> Any:
        return row(self._tokens)[None]


def runner(**sizes: Any) -> RecomputingRunner:
    return RecomputingRunner(LastRows, VOCABULARY, 200, **{"pages": 40, "page_size": 4, "capacity": 32, **sizes})  # type: ignore[arg-type]


def decode(tokens: Sequence[int]) -> str:
    """Each token is a letter."""
    return "".join(chr(ord("0") + token) for token in tokens)


def alone(request: GenerationRequest, context: int) -> list[int]:
    """The tokens of a request, computed one by one without an engine; stop strings are not regarded."""
    tokens, sampler = list(request.prompt), Sampler(request.sampling, request.prompt)
    limit = min(context, len(tokens) + (request.max_tokens or context))
    while len(tokens) < limit:
        token = sampler.choose(row(tokens), len(tokens)).token
        tokens.append(token)
        if token in request.end_tokens:
            break
        sampler.record(token)
    return tokens[len(request.prompt) :]
