"""`TokenFilter`: which tokens may come next in a text; and `MaskedTokens`, which leaves out the same tokens always."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenFilter(Protocol):
    """The state of one text: which tokens may follow. One thread at a time may use it."""

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next: bool [vocabulary]."""
        ...

    def accept(self, token: int) -> None:
        """Append a token."""
        ...

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow each other next. Changes nothing."""
        ...


class MaskedTokens:
    """Leaves out tokens: those of `first` only before the first token of the text, those of `always` everywhere."""

    def __init__(self, vocabulary: int, always: Collection[int], first: Collection[int] = ()) -> None:
        self._later = _mask(vocabulary, always)
        self._next = _mask(vocabulary, {*always, *first})

    def allowed(self) -> NDArray[np.bool_]:
        return self._next

    def accept(self, token: int) -> None:
        self._next = self._later

    def count_allowed(self, tokens: Sequence[int]) -> int:
        mask = self._next
        for count, token in enumerate(tokens):
            if not mask[token]:
                return count
            mask = self._later
        return len(tokens)


def _mask(vocabulary: int, left_out: Collection[int]) -> NDArray[np.bool_]:
    mask = np.ones(vocabulary, np.bool_)
    mask[[token for token in left_out if token < vocabulary]] = False
    return mask
