"""Measures graphs in turns, so that other work on the machine delays each of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter_ns

from lathe.core.compiler.compile import compile
from lathe.core.compress.calibration import Feeds
from lathe.core.ir.graph import Graph

_ROUNDS = 9  # turns of each graph: the least of their times counts, as other work only adds time
_SHORTEST = 2_000_000  # nanoseconds of a turn, above which the clock and single interrupts hardly matter
_WARMING = 3  # runs of each graph before the first turn


def time_in_turns(
    models: Sequence[Graph | bytes], feeds: Feeds, pause: Callable[[], None] = lambda: None, rounds: int = _ROUNDS
) -> list[int]:
    """The nanoseconds of one run of each model (graph or ONNX file) on `feeds`, on one thread.

    Models run in turns of at least 2 ms. The least mean of a turn counts. `pause` is called before each turn.
    """
    with ExitStack() as stack:
        sessions = [stack.enter_context(compile(model, threads=1, tune="off")) for model in models]
        runs = []
        for session in sessions:
            for _ in range(_WARMING):
                began = perf_counter_ns()
                session.run(feeds)
            runs.append(max(_SHORTEST // max(perf_counter_ns() - began, 1), 1))
        least = [0] * len(sessions)
        for _ in range(rounds):
            for place, session in enumerate(sessions):
                pause()
                began = perf_counter_ns()
                for _ in range(runs[place]):
                    session.run(feeds)
                time = max((perf_counter_ns() - began) // runs[place], 1)
                least[place] = min(time, least[place] or time)
    return least
