"""How `python -m loadtest generate` and an engine's process talk. Needs NumPy only; runs in any environment.

The process writes a line of JSON with the limits of its model. It reads one request per line, JSON `[prompts, count]`,
and answers with a line of JSON: seconds to the first and to the last token, by the clock and of the processor, the
tokens, and memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Row = tuple[int, int, int, bool]  # token, position, sequence, whether its next token is wanted
Step = Callable[[Sequence[Row]], list[int]]
Prompts = Sequence[Sequence[int]]
CHUNK = 512  # most tokens of a run


class Stopwatch:
    """Notes when the first and the last token of a request came: seconds by the clock, and of the processor."""

    def __init__(self, requests: int) -> None:
        self._start = self._now()
        self._firsts: list[tuple[float, float] | None] = [None] * requests
        self._last = self._start
        self.tokens: list[list[int]] = [[] for _ in range(requests)]

    def add(self, request: int, tokens: Sequence[int]) -> None:
        """Add tokens that have just come."""
        self._last = self._now()
        self._firsts[request] = self._firsts[request] or self._last
        self.tokens[request] += tokens

    def answer(self) -> dict[str, list[Any]]:
        """`wall` and `cpu`: seconds to the first token of all prompts, and to the last; and the `tokens`."""
        first = max(each for each in self._firsts if each is not None)
        wall, cpu = ([later[i] - self._start[i] for later in (first, self._last)] for i in range(2))
        return {"wall": wall, "cpu": cpu, "tokens": self.tokens}

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def greedy(step: Step, prompts: Prompts, count: int) -> dict[str, list[Any]]:
    """Decode `count` tokens for each prompt with an engine that runs one step at a time; `Stopwatch.answer`."""
    watch = Stopwatch(len(prompts))
    rows = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    last = [token for at in range(0, len(rows), CHUNK) for token in step(rows[at : at + CHUNK])]
    for i in range(count):
        for sequence, token in enumerate(last):
            watch.add(sequence, [token])
        if i < count - 1:
            last = step([(token, len(prompts[s]) + i, s, True) for s, token in enumerate(last)])
    return watch.answer()


def serve(generate: Callable[[Prompts, int], dict[str, list[Any]]], vocabulary: int, context: int) -> None:
    """Answer requests until the input ends."""
    print(json.dumps({"vocabulary": vocabulary, "context": context}), flush=True)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        print(json.dumps({**generate(prompts, count), "rss": rss_mib()}), flush=True)


def rss_mib() -> int:
    """The resident memory of this process in MiB (Linux)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmRSS"))
