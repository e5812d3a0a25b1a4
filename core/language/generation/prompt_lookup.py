"""`PromptLookup`: drafts for texts that repeat themselves or their prompt."""

from __future__ import annotations

from collections.abc import Sequence as Items

from lathe.core.language.generation.sequence import Sequence

_SIZES = (3, 2)  # tokens of a repetition; with one token alone most guesses would be wrong


class PromptLookup:
    """Guesses that a text repeats itself: what followed the last earlier occurrence of its last tokens.

    Saxena, 2023: Prompt Lookup Decoding. The longest of `_SIZES` that occurs earlier decides.
    """

    def __init__(self) -> None:
        self._indices: dict[Sequence, _Index] = {}

    def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        return [
            self._indices.setdefault(sequence, _Index()).following(sequence.tokens, count) for sequence, count in wanted
        ]

    def release(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)

    def close(self) -> None:
        self._indices.clear()


class _Index:
    """Where consecutive tokens of a text occurred last: the place after each of them."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._length = 0  # the tokens that it covers: all but the last one, which nothing follows

    def following(self, tokens: Items[int], count: int) -> list[int]:
        self._extend(tokens)
        for size in _SIZES:
            place = self._after.get(tuple(tokens[-size:]))
            if place is not None:
                return _continued(tokens, place, count)
        return []

    def _extend(self, tokens: Items[int]) -> None:
        for end in range(self._length + 1, len(tokens)):
            for size in _SIZES:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._length = max(self._length, len(tokens) - 1)


def _continued(tokens: Items[int], place: int, count: int) -> list[int]:
    """`count` tokens from a place on; beyond the end of the text they repeat themselves."""
    found = list(tokens[place : place + count])
    while len(found) < count:
        found.append(found[len(found) - (len(tokens) - place)])
    return found
