"""`GeneratorOptions`, apart from the code that uses them: settings need them before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

CACHE_BYTES = 512 << 20  # by default: 11,000 tokens of SmolLM2-135M


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    """`cache_bytes`: memory for keys and values. `threads`: of the native code; None for all CPUs."""

    cache_bytes: int = CACHE_BYTES
    threads: int | None = None
