"""Traces of requests for OpenTelemetry: one span per request, with its time in the queue and in its batch below it.

A caller's W3C `traceparent` header decides whether its request is recorded; of the others a share is. Spans are written
once a request has ended, from the times its batch noted anyway, so a request that is not recorded costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.batching.entry import Entry, Outcome
from server.batching.execution import Ran
from server.errors import ServerError
from server.pipelines.flow import StepEntry
from server.types import ModelRef

Clock: TypeAlias = Callable[[float], int]  # from monotonic seconds to nanoseconds since 1970
Attributes: TypeAlias = Mapping[str, str | int]


class Tracing:
    """Writes spans to a collector (OTLP over HTTP), in a thread of its own."""

    def __init__(self, endpoint: str, share: float, exporter: SpanExporter | None = None) -> None:
        """``share``: how many of the requests without a `traceparent` are recorded, 0 to 1."""
        resource = Resource.create({"service.name": "lathe"})
        self._provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)), resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(f"{endpoint}/v1/traces")))
        self._tracer = self._provider.get_tracer("lathe")
        self._propagator = TraceContextTextMapPropagator()

    def watch(self, entry: Entry, ref: ModelRef, traceparent: str) -> Callable[[Outcome], None]:
        """Record a request that is about to be queued, if it is to be recorded.

        Returns what to call when it is refused and so never gets its outcome.
        """
        context = self._propagator.extract({"traceparent": traceparent}) if traceparent else Context()
        began = time.time_ns()
        offset = began - time.monotonic_ns()
        span = self._tracer.start_span(f"infer {ref.name}", context, SpanKind.SERVER, _named(ref), start_time=began)
        tell = entry.done

        def ended(outcome: Outcome) -> None:
            self._end(span, entry, outcome, lambda seconds: int(seconds * 1e9) + offset)

        def done(outcome: Outcome) -> None:
            tell(outcome)
            ended(outcome)

        if span.is_recording():
            entry.done = done
        return ended

    def close(self) -> None:
        """Send what is left; blocks."""
        self._provider.shutdown()

    def _end(self, span: Span, entry: Entry, outcome: Outcome, clock: Clock) -> None:
        if isinstance(outcome, Exception):
            span.set_status(StatusCode.ERROR, outcome.message if isinstance(outcome, ServerError) else "")
        self._inside(span, entry, clock)
        span.end()

    def _inside(self, span: Span, entry: Entry, clock: Clock) -> None:
        """Write what happened between a request's begin and end: its batch, or the steps it went through."""
        if entry.ran is not None:
            self._below(span, entry, entry.ran, clock)
        for part in entry.parts:
            if isinstance(part, StepEntry) and part.ended is not None:
                at = (clock(part.since), clock(part.ended))
                step = self._step(f"step {part.step}", set_span_in_context(span), *at, _named(part.ref))
                self._inside(step, part, clock)

    def _below(self, span: Span, entry: Entry, ran: Ran, clock: Clock) -> None:
        context = set_span_in_context(span)
        self._step("queue", context, clock(entry.since), clock(ran.started))
        batch = self._step("batch", context, clock(ran.started), clock(ran.scattered), {"lathe.rows": ran.rows})
        within = set_span_in_context(batch)
        self._step("gather", within, clock(ran.started), clock(ran.gathered))
        self._step("execute", within, clock(ran.gathered), clock(ran.executed))
        self._step("scatter", within, clock(ran.executed), clock(ran.scattered))

    def _step(self, name: str, context: Context, began: int, ended: int, more: Attributes | None = None) -> Span:
        span = self._tracer.start_span(name, context, attributes=more, start_time=began)
        span.end(ended)
        return span


def _named(ref: ModelRef) -> Attributes:
    return {"lathe.model": ref.name, "lathe.version": ref.version}
