"""`GeneratorOptions`, apart from the code that uses them: settings need them before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

CacheType: TypeAlias = Literal["float32", "float16", "bfloat16", "int8"]
DRAFT_TOKENS = 8
CACHE_BYTES = 512 << 20  # by default: 11,000 tokens of SmolLM2-135M


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    """`cache_bytes`: memory for keys and values. `threads`: of the native code; None for all CPUs.

    `speculation`: where drafts of at most `draft_tokens` tokens come from: "none", "lookup" (the text itself) or
    "model" (a draft model); None for "model" if there is a draft model, otherwise "none". `cache_dtype`: of keys and
    values, see `lathe.core.language.cached_decoder.CachedDecoder`.
    """

    cache_bytes: int = CACHE_BYTES
    threads: int | None = None
    speculation: Literal["none", "lookup", "model"] | None = None
    draft_tokens: int = DRAFT_TOKENS
    cache_dtype: CacheType = "float32"
