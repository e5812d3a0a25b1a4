"""`TextOutcome`: what a trial learns from one text of a language model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextOutcome:
    """How one text ended.

    `failed`: by an error of the server, or the caller left before the first token. `token_seconds`: the mean time of a
    token after the first; None for a text of less than two tokens. `log_probability`: the mean natural logarithm of the
    tokens' probabilities, as the version that wrote the text sees them; None without a token.
    """

    failed: bool
    token_seconds: float | None = None
    log_probability: float | None = None
