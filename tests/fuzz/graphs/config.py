"""How a model is compiled and run: one random configuration for each graph."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

TARGETS = ("", "", "", "", "", "", "x86-64-v3", "plain")  # by seed; "" is the machine's own


@dataclass(frozen=True)
class Config:
    """`cache` bytes force large batches into pieces; `forced` lets the smallest run use all threads."""

    threads: int = 1
    max_batch: int = 32
    optimize: bool = True
    winograd: bool = True
    forced: bool = False
    cache: int | None = None
    packing: int | None = None


def target_of(seed: int) -> str:
    """What LATHE_TARGET has to be in the process that runs a seed: a process has one target."""
    return TARGETS[seed % len(TARGETS)]


def drawn(rng: random.Random, lengths: bool) -> Config:
    """A configuration. `lengths`: whether the model has sequences of any length, which may be packed."""
    threads = rng.choice((1, 1, 2, 3, 4))
    return Config(
        threads,
        rng.choice((1, 4, 32)),
        rng.random() < 0.92,
        rng.random() < 0.8,
        threads > 1 and rng.random() < 0.8,
        rng.choice((None, 1, 2000, 8192)),
        32 if lengths and rng.random() < 0.5 else None,
    )


@contextmanager
def applied(config: Config) -> Iterator[None]:
    """The thresholds of the runtime as the configuration says."""
    changes = {}
    if config.forced:
        changes.update({"executable._ALONE_BELOW": 0, "executable._ALONE_BELOW_IN_A_ROW": 0})
    if config.cache is not None:
        changes["pieces._CACHE_BYTES"] = config.cache
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch(f"core.runtime.{name}", value))
        yield
