"""`TextTrace`: the spans of one request for texts, for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context

from lathe.core.language.generation.request import End
from lathe.server.errors import ServerError

Clock: TypeAlias = Callable[[float], int]  # from monotonic seconds to nanoseconds since 1970


class TextTrace:
    """The span of a request, with a span for each text below it. Names of tokens are OpenTelemetry's for generation."""

    def __init__(self, tracer: Tracer, span: Span, clock: Clock) -> None:
        self._tracer = tracer
        self._span = span
        self._clock = clock

    def text(self, began: float, first: float, ended: float, end: End) -> None:
        """Write the spans of a text that has ended; its first token came at `first`. Times in monotonic seconds."""
        if not self._span.is_recording():
            return
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": end.prompt_tokens,
            "gen_ai.usage.output_tokens": end.generated_tokens,
            "gen_ai.response.finish_reasons": (end.reason,),
            "lathe.cached_tokens": end.cached_tokens,
            "lathe.time_to_first_token": first - began,
        }
        at = (self._clock(began), self._clock(first), self._clock(ended))
        above = set_span_in_context(self._span)
        text = self._tracer.start_span("text", above, attributes=attributes, start_time=at[0])
        within = set_span_in_context(text)
        self._tracer.start_span("first token", within, start_time=at[0]).end(at[1])
        self._tracer.start_span("further tokens", within, start_time=at[1]).end(at[2])
        text.end(at[2])

    def close(self, error: ServerError | None) -> None:
        """End the span of the request, which may have failed."""
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error.message)
        self._span.end()
