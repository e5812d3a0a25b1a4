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
    """How a model is compiled. `cache`: cache bytes, which limit chunks; `forced`: small runs use all threads, too."""

    threads: int = 1
    max_batch: int = 32
    optimize: bool = True
    winograd: bool = True
    forced: bool = False
    cache: int | None = None
    packing: int | None = None


def target_of(seed: int) -> str:
    """The value of LATHE_TARGET in the process that runs a seed: a process has one target."""
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
    """Sets the thresholds of the runtime by the configuration."""
    changes = {}
    if config.forced:
        changes.update({"host.executable._ONE_THREAD_BELOW": 0, "host.executable._ONE_THREAD_BELOW_WHEN_AWAKE": 0})
    if config.cache is not None:
        changes["host.chunks._CACHE_BYTES"] = config.cache
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch(f"lathe.core.runtime.{name}", value))
        yield
