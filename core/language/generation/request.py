"""Requests to the generation engine, and the progress that it reports to callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lathe.core.language.sampling import Choice, SamplingSettings
from lathe.core.language.source import Source
from lathe.core.language.token_filter import TokenFilter

EndReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to generate.

    `constraint`: the state of a grammar that the text must match, or another filter, for this request alone.
    `max_tokens`: at most this many tokens; None for as many as fit. `stops`: the text ends before the first of these
    strings. `end_tokens` end the text and have no text of their own. Requests of higher `priority` go first; among
    requests of one priority, the `client`s get equal shares of the tokens. `adapter`: the number of the runner's
    adapter from 1 on, 0 for none. `source`: what an encoder-decoder reads; the prompt is then the beginning of the
    text.
    """

    prompt: tuple[int, ...]
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()
    priority: int = 0
    client: str = ""
    constraint: TokenFilter | None = None
    adapter: int = 0
    source: Source | None = None

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt; of an encoder-decoder for texts those of the source."""
        is_text = self.source is not None and self.source.array.ndim == 1
        return len(self.source.array) if self.source is not None and is_text else len(self.prompt)


@dataclass(frozen=True, slots=True)
class End:
    """How a text has ended: `stop` by a stop string or an end token, `length` by a limit.

    `error`: the exception of an `error`. `cached_tokens`: tokens of the prompt that were in the cache already.
    """

    reason: EndReason
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    stop: str | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """New text with the tokens that it belongs to. The last one of a request has an `end`."""

    text: str = ""
    choices: tuple[Choice, ...] = ()
    end: End | None = None


Listener: TypeAlias = Callable[[Progress], None]  # called on the engine's thread; must not block or raise
