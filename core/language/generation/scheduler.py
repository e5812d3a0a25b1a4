"""`Scheduler`: chooses the tokens of each run, and gives pages to sequences (continuous batching).

A run has one token of each sequence that generates, and parts of prompts (Yu et al., 2022: Orca; Agrawal et al., 2023:
Sarathi). Keys and values lie in pages (Kwon et al., 2023: PagedAttention).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np

from lathe.core.language.generation.drafting import Drafting
from lathe.core.language.generation.page_pool import PagePool
from lathe.core.language.generation.sequence import Sequence
from lathe.core.language.sampling import Logits
from lathe.core.language.token_runner import Chunk


@dataclass(frozen=True, slots=True)
class Step:
    """The part of a run that belongs to one sequence; the last tokens of its chunk are the `draft`."""

    sequence: Sequence
    chunk: Chunk
    draft: Items[int] = ()


@dataclass(slots=True)
class Counters:
    """Counts since the start of the engine. Only its thread writes them."""

    runs: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # of prompts, found in the cache
    generated_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of drafts
    run_seconds: float = 0.0


class Scheduler:
    """The sequences that wait and run, and their pages. Not thread-safe: the engine's thread uses it.

    A sequence is admitted when there are pages for all its tokens so far, and one more page for each running sequence.
    If pages run out, the newest sequence of the lowest priority loses its pages, and is computed again later.
    """

    def __init__(
        self,
        page_count: int,
        page_size: int,
        capacity: int,
        *,
        sequences: int = 64,
        prompt_tokens: int = 128,
        drafting: Drafting | None = None,
    ) -> None:
        """`capacity`: the most tokens of a run. `sequences`: the most that run at once. `prompt_tokens`: the most
        tokens of prompts in a run while other sequences generate, so that these do not wait long.
        """
        self.pool = PagePool(page_count)
        self.counters = Counters()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._page_size = page_size
        self._capacity = capacity
        self._most_sequences = min(sequences, capacity)
        self._prompt_tokens = prompt_tokens
        self._drafting = drafting
        self._served: Counter[str] = Counter()  # tokens by client, of clients with sequences

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. A client that had none begins with the least share of the others."""
        client = sequence.request.client
        if client not in self._clients():
            self._served[client] = min(self._served.values(), default=0)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, and free its pages at once; no effect if it has left before."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if (client := sequence.request.client) not in self._clients():
            self._served.pop(client, None)

    def next_run(self) -> list[Step]:
        """The steps of the next run; empty if there is nothing to compute."""
        self._admit()
        generating = [each for each in self.running if each.missing == 1]
        generating.sort(key=lambda each: (-each.request.priority, each.last_run, each.arrival))
        steps: list[Step] = []
        self._plan(generating, self._capacity, steps)
        self._add_drafts(steps)
        left = self._capacity - sum(len(step.chunk.tokens) for step in steps)
        prompts = [each for each in self.running if each.missing > 1]
        prompts.sort(key=lambda each: (-each.request.priority, self._served[each.request.client], each.arrival))
        self._plan(prompts, min(left, self._prompt_tokens) if steps else left, steps)
        self.counters.runs += bool(steps)
        return steps

    def finish_run(self, steps: Items[Step], logits: Logits) -> None:
        """Take the logits [sum of wanted, vocabulary] of a run: choose tokens, and let ended sequences go."""
        start = 0
        for step in steps:
            sequence, count = step.sequence, len(step.chunk.tokens) - len(step.draft)
            rows, start = logits[start : start + step.chunk.wanted], start + step.chunk.wanted
            before, ended = sequence.generated, False
            sequence.computed += count
            sequence.last_run = self.counters.runs
            self.counters.prompt_tokens += count if not step.chunk.wanted or not before else count - 1
            if step.chunk.wanted:
                ended = self._choose(step, rows)
            self._served[sequence.request.client] += count + max(sequence.generated - before - 1, 0)
            self._seal(sequence)
            if ended:
                self.remove(sequence)

    def _choose(self, step: Step, rows: Logits) -> bool:
        """Choose the tokens of a step; returns whether its text has ended."""
        sequence, counters = step.sequence, self.counters
        before, computed = sequence.generated, sequence.computed
        ended = sequence.choose_all(rows, step.draft)
        counters.generated_tokens += sequence.generated - before
        if step.draft and self._drafting is not None:
            accepted = sequence.computed - computed
            counters.drafted_tokens += len(step.draft)
            counters.accepted_tokens += accepted
            self._drafting.record(sequence, len(step.draft), accepted)
        return ended

    def fail_run(self, steps: Items[Step], error: Exception) -> None:
        """End the sequences of a run that has raised."""
        for step in steps:
            self.remove(step.sequence)
            step.sequence.end("error", error)

    def _clients(self) -> set[str]:
        return {each.request.client for each in (*self.running, *self.waiting)}

    # admission

    def _admit(self) -> None:
        if not self.waiting:
            return
        in_work = self._keys_in_work()
        waiting = sorted(
            self.waiting, key=lambda each: (-each.request.priority, self._served[each.request.client], each.arrival)
        )
        for sequence in waiting:
            if len(self.running) >= self._most_sequences:
                return
            keys = self._reusable_keys(sequence)
            found = self.pool.find(keys)
            if len(found) < len(keys) and keys[len(found)] in in_work:
                continue  # another sequence computes this page: wait and share it
            if not self._give_pages(sequence, found):
                return  # those behind it wait, too: otherwise short texts would always overtake a long one
            self.waiting.remove(sequence)
            self.running.append(sequence)
            in_work.update(keys[len(found) :])

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """The keys of the pages that it may share: not the page of its last token, whose logits are needed."""
        return sequence.keys(self._page_size)[: (len(sequence.tokens) - 1) // self._page_size]

    def _keys_in_work(self) -> set[bytes]:
        """The keys of the pages that running sequences will have computed, but have not yet."""
        return {
            key
            for sequence in self.running
            if sequence.missing > 1
            for key in sequence.keys(self._page_size)[sequence.computed // self._page_size :]
        }

    def _give_pages(self, sequence: Sequence, found: list[int]) -> bool:
        """Give a waiting sequence the found pages, and new ones for its other tokens; False if there are too few."""
        self.pool.share(found)
        needed = self._page_total(len(sequence.tokens)) - len(found)
        while self.pool.available < needed + len(self.running):
            victim = self._victim()
            if victim is None or victim.request.priority >= sequence.request.priority:
                if not self.running and self.pool.available >= needed:
                    break
                self.pool.release(found)
                return False
            self._preempt(victim)
        sequence.pages = found + [self.pool.take() for _ in range(needed)]
        sequence.computed = len(found) * self._page_size
        sequence.sealed = len(found)
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.counters.cached_tokens += sequence.computed
        return True

    def _page_total(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    # runs

    def _plan(self, sequences: Items[Sequence], budget: int, steps: list[Step]) -> None:
        """Append the steps of these sequences, the first ones first, with at most `budget` tokens."""
        for sequence in sequences:
            count = min(sequence.missing, budget)
            if not count:
                return
            if sequence not in self.running or not self._reserve(sequence, count, steps):
                continue  # it has lost its pages
            end = sequence.computed + count
            tokens = np.array(sequence.tokens[sequence.computed : end], np.int64)
            wanted = int(end == len(sequence.tokens))
            pages, request = tuple(sequence.pages), sequence.request
            chunk = Chunk(tokens, sequence.computed, pages, wanted, request.adapter, request.source)
            steps.append(Step(sequence, chunk))
            budget -= count

    def _add_drafts(self, steps: list[Step]) -> None:
        """Give the steps of generating sequences drafts, as far as tokens of a run and free pages suffice."""
        if self._drafting is None or not steps:
            return
        drafts, left = self._drafting.drafts([step.sequence for step in steps]), self._capacity - len(steps)
        for index, step in enumerate(steps):
            sequence, chunk = step.sequence, step.chunk
            draft = drafts.get(sequence, [])[:left]
            while draft and len(sequence.pages) < self._page_total(sequence.computed + 1 + len(draft)):
                if self.pool.available > len(self.running):  # each may need a page for its next token
                    sequence.pages.append(self.pool.take())
                else:
                    draft.pop()
            if draft:
                tokens = np.concatenate([chunk.tokens, draft])
                chunk = replace(chunk, tokens=tokens, wanted=1 + len(draft), pages=tuple(sequence.pages))
                steps[index] = Step(sequence, chunk, draft)
                left -= len(draft)

    def _reserve(self, sequence: Sequence, count: int, steps: Items[Step]) -> bool:
        """Give a running sequence the pages for its next tokens; False if it was preempted, or has to wait."""
        planned = {id(step.sequence) for step in steps}
        while len(sequence.pages) < self._page_total(sequence.computed + count):
            if self.pool.available:
                sequence.pages.append(self.pool.take())
                continue
            victim = self._victim()
            assert victim is not None  # the sequence itself runs
            if id(victim) in planned:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence | None:
        """The sequence that loses its pages first: of the lowest priority, the newest."""
        return min(self.running, key=lambda each: (each.request.priority, -each.arrival), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.append(sequence)
        self.counters.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        if self._drafting is not None:
            self._drafting.release(sequence)
        sequence.pages, sequence.computed, sequence.sealed = [], 0, 0

    def _seal(self, sequence: Sequence) -> None:
        full = sequence.computed // self._page_size
        if full > sequence.sealed:
            keys = sequence.keys(self._page_size)
            for index in range(sequence.sealed, full):
                self.pool.seal(sequence.pages[index], keys[index])
            sequence.sealed = full
