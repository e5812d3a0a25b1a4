"""Compilations after loading: `python -m loadtest generation lengths FILE_OR_FOLDER`.

The model is loaded as the server loads it. Then prompts of 1 to 2,048 tokens (or the model's context), and a token
after each, run while a counter counts libraries of code that LLVM links, and child processes. The promise: none. Runs
hold at most 512 tokens, so every number of tokens of a run occurs with the prompts of 1 to 512; of the longer ones
every 32nd runs.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from lathe.core.language.generation.generator import load_model, make_runner
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.source import Source
from lathe.core.language.token_runner import Chunk, TokenRunner

_LONGEST, _STEP = 2048, 32


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest generation lengths", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    runner = make_runner(load_model(args.model), GeneratorOptions(threads=args.threads))
    with closing(runner), counted() as counts:
        lengths = prompt_lengths(min(_LONGEST, runner.context - 1), runner.capacity)
        for length in lengths:
            _run(runner, length)
    print(f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens: {sum(counts.values())} compilations")
    return int(bool(counts))


def prompt_lengths(longest: int, capacity: int) -> list[int]:
    """All lengths up to `capacity`, then every 32nd, and the longest."""
    return sorted({*range(1, min(longest, capacity) + 1), *range(_STEP, longest + 1, _STEP), longest})


def _run(runner: TokenRunner, length: int) -> None:
    """A prompt in chunks, and a token after it."""
    pages = range(-(-(length + 1) // runner.page_size))
    source = Source(np.ones(length, np.int64))  # for encoder-decoders; others do not read it
    for start in (*range(0, length, runner.capacity), length):
        stop = min(start + runner.capacity, length) if start < length else length + 1
        runner.run([Chunk(np.ones(stop - start, np.int64), start, pages, int(stop >= length), source=source)])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts libraries of code that LLVM links in this process, and processes that it starts."""
    counts: Counter[str] = Counter()
    kept = {name: getattr(owner, name) for owner, name in _COUNTED}
    for owner, name in _COUNTED:
        setattr(owner, name, _counting(kept[name], name, counts))
    try:
        yield counts
    finally:
        for owner, name in _COUNTED:
            setattr(owner, name, kept[name])


_COUNTED: tuple[tuple[Any, str], ...] = ((llvm, "create_lljit_compiler"), (subprocess, "Popen"))


def _counting(function: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        counts[name] += 1
        return function(*arguments, **named)

    return call
