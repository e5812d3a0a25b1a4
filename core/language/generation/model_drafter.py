"""`ModelDrafter`: drafts by a second, smaller model."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from lathe.core.language.generation.page_pool import PagePool
from lathe.core.language.generation.sequence import Sequence
from lathe.core.language.sampling import Logits
from lathe.core.language.token_runner import Chunk, TokenRunner


@dataclass
class _Draft:
    """The state of a text in the draft model: its pages, and the tokens whose keys and values they hold."""

    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    checked: int = 0  # the first of them are those of the text; the text decides about the rest

    def agree(self, tokens: Items[int]) -> None:
        """Forget the tokens that are not those of the text."""
        end = min(self.checked, len(tokens) - 1)  # the last token is computed in any case: its logits are needed
        while end < min(len(self.tokens), len(tokens) - 1) and self.tokens[end] == tokens[end]:
            end += 1
        del self.tokens[end:]
        self.checked = end


class ModelDrafter:
    """Guesses with a smaller model, which has a cache of its own.

    A text draws from its logits with the random number of the position: where both models agree, so do the tokens.
    Texts that are too long for it, or for which there are no pages, get no drafts. A call computes at most `capacity`
    tokens of texts that it has not seen, so that a long prompt does not hold up the others.
    """

    def __init__(self, runner: TokenRunner, vocabulary: int) -> None:
        """`vocabulary`: of the model that checks the drafts. Owns the runner, and closes it."""
        self._runner = runner
        self._vocabulary = vocabulary
        self._pool = PagePool(runner.page_count)
        self._drafts: dict[Sequence, _Draft] = {}

    def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        found: dict[Sequence, list[int]] = {}
        counts = dict(wanted)
        ready, logits = self._read(wanted)
        while ready:
            for sequence, row in zip(ready, logits, strict=True):
                guesses = found.setdefault(sequence, [])
                guesses.append(sequence.guess(self._fitted(row), len(guesses)))
            ready = [sequence for sequence in ready if len(found[sequence]) < counts[sequence]]
            logits = self._run([(sequence, found[sequence][-1:]) for sequence in ready])
        return [found.get(sequence, []) for sequence, _ in wanted]

    def release(self, sequence: Sequence) -> None:
        draft = self._drafts.pop(sequence, None)
        if draft is not None:
            self._pool.release(draft.pages)

    def close(self) -> None:
        self._runner.close()

    def _read(self, wanted: Items[tuple[Sequence, int]]) -> tuple[list[Sequence], Logits]:
        """Compute the new tokens of texts. Returns the texts of which no token is left, and logits after them."""
        left, parts, ready = self._runner.capacity, [], []
        for sequence, count in wanted:
            draft = self._drafts.setdefault(sequence, _Draft())
            draft.agree(sequence.tokens)
            if not left or not count or not self._reserve(sequence, draft, count):
                continue
            new = sequence.tokens[len(draft.tokens) :][:left]
            left -= len(new)
            parts.append((sequence, new))
            if len(draft.tokens) + len(new) == len(sequence.tokens):
                ready.append(sequence)
        logits = self._run(parts)
        rows = [row for (sequence, _), row in zip(parts, logits, strict=True) if sequence in ready]
        for sequence, new in parts:
            self._drafts[sequence].checked += len(new)
        return ready, np.array(rows)

    def _reserve(self, sequence: Sequence, draft: _Draft, count: int) -> bool:
        """Give a text pages for its tokens and `count` more; False if that cannot be."""
        runner, total = self._runner, len(sequence.tokens) + count
        needed = -(-total // runner.page_size) - len(draft.pages)
        if total > runner.context or needed > self._pool.available:
            return False
        if max(sequence.tokens[len(draft.tokens) :]) >= runner.vocabulary:
            return False
        draft.pages += [self._pool.take() for _ in range(needed)]
        return True

    def _run(self, parts: Items[tuple[Sequence, list[int]]]) -> Logits:
        chunks = []
        for sequence, new in parts:
            draft = self._drafts[sequence]
            chunks.append(Chunk(np.array(new, np.int64), len(draft.tokens), tuple(draft.pages)))
            draft.tokens += new
        return self._runner.run(chunks)

    def _fitted(self, logits: Logits) -> Logits:
        """Logits for the vocabulary of the model that checks: files may have rows for tokens that do not exist."""
        if len(logits) >= self._vocabulary:
            return logits[: self._vocabulary]
        return np.concatenate([logits, np.full(self._vocabulary - len(logits), -np.inf, np.float32)])
