"""`Drafting`: guesses tokens that follow texts, which the model then checks all in one run (speculative decoding).

A guess costs a row of the run, and changes no text: each token is still the choice of the text's own sampler from the
model's logits, and guesses are used as far as they equal these choices. Leviathan et al. (2023) and Chen et al. (2023)
accept by a random number when they sample; here the text's seed decides each token, so samples stay the same as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from typing import Protocol

from lathe.core.language.generation.sequence import Sequence

log = logging.getLogger(__name__)


class Drafter(Protocol):
    """Guesses the next tokens of texts. The engine's thread uses it."""

    def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """Guess tokens for each text, at most the number beside it in `wanted`; an empty list if there is no guess."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Free what belongs to a text; no effect if there is nothing."""
        ...

    def close(self) -> None: ...


class DraftLength:
    """How many tokens of a text to draft next: more after drafts that were right, none for a while after wrong ones.

    It doubles up to `most` after a draft that was right throughout. After a wrong first token the text gets no draft
    for 1 step, then 2, up to 32: so a text without repetitions pays for few rows.
    """

    _LONGEST_PAUSE = 32  # steps

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(2, most)
        self._pause = self._left = 0

    def next(self) -> int:
        """The length for the next step; counts a step."""
        if self._left:
            self._left -= 1
            return 0
        return self._length

    def record(self, drafted: int, accepted: int) -> None:
        """Note what has become of a draft."""
        if not drafted:
            return
        if not accepted:
            self._pause = self._left = min(max(1, 2 * self._pause), self._LONGEST_PAUSE)
            self._length = min(2, self._most)
            return
        self._pause = 0
        self._length = min(2 * self._length, self._most) if accepted == drafted else max(accepted, 1)


# A row costs a single stream about a third of a run, and many streams as much as another stream. So drafts fill runs up
# to this many tokens, and there are none beside as many texts.
_ROWS = 16


class Drafting:
    """The drafts of all texts of an engine: how long they are, and what has become of them. Owns the drafter.

    If the drafter fails, the texts go on without drafts.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        """`most`: the tokens of a draft. ValueError below 1."""
        if most < 1:
            raise ValueError(f"draft tokens: expected at least 1, got {most}")
        self._drafter: Drafter | None = drafter
        self._most = most
        self._lengths: dict[Sequence, DraftLength] = {}

    def drafts(self, sequences: Items[Sequence]) -> dict[Sequence, list[int]]:
        """Guesses for texts that generate, of which a run has one token each; each has at least one guess."""
        each = (_ROWS - len(sequences)) // len(sequences) if sequences else 0
        if self._drafter is None or each < 1:
            return {}
        wanted = []
        for sequence in sequences:
            length = self._lengths.setdefault(sequence, DraftLength(self._most))
            count = min(length.next(), each, sequence.room - 1)
            if count > 0:
                wanted.append((sequence, count))
        try:
            found = self._drafter.draft(wanted)
        except Exception:
            log.exception("drafts failed; texts go on without them")
            self.close()
            return {}
        pairs = ((sequence, sequence.possible(draft)) for (sequence, _), draft in zip(wanted, found, strict=True))
        return {sequence: draft for sequence, draft in pairs if draft}

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Note what has become of a draft."""
        if drafted:
            self._lengths[sequence].record(drafted, accepted)

    def release(self, sequence: Sequence) -> None:
        """Free what belongs to a text that has lost its pages, or has ended."""
        self._lengths.pop(sequence, None)
        if self._drafter is not None:
            self._drafter.release(sequence)

    def close(self) -> None:
        """Free the drafter; there are no more drafts."""
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            drafter.close()
