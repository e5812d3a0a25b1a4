"""Metrics of a language model, over the tokens that count."""

from __future__ import annotations

import math

from lathe.core.train.data.dataset import Values
from lathe.core.train.run.metrics import Matrix, log_softmax

_MOST_LOSS = 700.0  # the exponential of more overflows


class TokenMetrics:
    """`perplexity`, the exponential of the mean loss per token; `loss`; `accuracy`, the share of likeliest tokens.

    Targets are int64 [N, L], negative for tokens that do not count, and outputs are logits [N, L, vocabulary].
    """

    confusion: Matrix | None = None

    def __init__(self) -> None:
        self._loss, self._correct, self._count = 0.0, 0, 0

    def add(self, target: Values, output: Values) -> None:
        counted = target >= 0
        tokens, logits = target[counted], output[counted]
        if not len(tokens):
            return
        chosen = log_softmax(logits)[range(len(tokens)), tokens]
        self._loss -= float(chosen.sum())
        self._correct += int((logits.argmax(axis=1) == tokens).sum())
        self._count += len(tokens)

    def values(self) -> dict[str, float]:
        count = max(self._count, 1)
        loss = self._loss / count
        return {"perplexity": math.exp(min(loss, _MOST_LOSS)), "loss": loss, "accuracy": self._correct / count}
