"""Traces of requests for OpenTelemetry: a span per request, with child spans of queue, batch and kernels.

The client's W3C `traceparent` header decides whether a request is recorded; of requests without that header, a share is
recorded. Spans are written after a request has ended, from the times that its batch notes in any case, so a request
that is not recorded costs little. Only a batch with a recorded request takes times of its kernels. Kernel spans are
written once per batch, below the batch span of its first recorded request; the batch spans of the other requests link
to that batch span.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lathe.server.backends.base import KernelRun
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.execution import BatchResult
from lathe.server.errors import ServerError
from lathe.server.pipelines.execution import StepEntry
from lathe.server.telemetry.text_trace import Clock, TextTrace
from lathe.server.types import ModelRef

Attributes: TypeAlias = Mapping[str, str | int]
_KEPT = 16_384  # spans that wait to be sent; further spans are dropped
_AT_ONCE = 16  # kernel spans per turn of the event loop: each takes about 20 microseconds


class _Kernel(NamedTuple):
    """A kernel run whose span is not written yet, the context of its parent span, and the clock of its times."""

    run: KernelRun
    above: Context
    clock: Clock


class Tracing:
    """Sends spans to a collector (OTLP over HTTP), in a thread of its own."""

    def __init__(self, endpoint: str, share: float, exporter: SpanExporter | None = None) -> None:
        """`share`: the share, 0 to 1, of requests without a `traceparent` header that are recorded."""
        resource = Resource.create({"service.name": "lathe"})
        self._provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)), resource=resource)
        exporter = exporter or OTLPSpanExporter(f"{endpoint}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_KEPT))
        self._tracer = self._provider.get_tracer("lathe")
        self._propagator = TraceContextTextMapPropagator()
        self._kernels: deque[_Kernel] = deque()

    def watch(self, entry: Entry, ref: ModelRef, traceparent: str) -> Callable[[Outcome], None]:
        """Start the span of a request before it is queued; it is recorded only if the request is sampled.

        Returns a function to call with the error if the request is refused, since it then has no outcome.
        """
        span, clock = self._start(f"infer {ref.name}", ref, traceparent)
        deliver = entry.done

        def end_span(outcome: Outcome) -> None:
            self._end(span, entry, outcome, clock)

        def deliver_and_end(outcome: Outcome) -> None:
            deliver(outcome)
            end_span(outcome)

        if span.is_recording():
            entry.done = deliver_and_end
            entry.trace = f"{span.get_span_context().trace_id:032x}"
        return end_span

    def watch_texts(self, ref: ModelRef, traceparent: str) -> TextTrace:
        """Start the span of a request for texts; it is recorded only if the request is sampled."""
        return TextTrace(self._tracer, *self._start(f"generate {ref.name}", ref, traceparent))

    def close(self) -> None:
        """Send the remaining spans; blocks."""
        self._write_kernels(len(self._kernels))
        self._provider.shutdown()

    def _start(self, name: str, ref: ModelRef, traceparent: str) -> tuple[Span, Clock]:
        """Start the span of a request; returns the clock of its times, too."""
        context = self._propagator.extract({"traceparent": traceparent}) if traceparent else Context()
        began = time.time_ns()
        offset = began - time.monotonic_ns()
        span = self._tracer.start_span(name, context, SpanKind.SERVER, _attributes(ref), start_time=began)
        return span, lambda seconds: int(seconds * 1e9) + offset

    def _end(self, span: Span, entry: Entry, outcome: Outcome, clock: Clock) -> None:
        if isinstance(outcome, Exception):
            span.set_status(StatusCode.ERROR, outcome.message if isinstance(outcome, ServerError) else "")
        self._write_children(span, entry, clock)
        span.end()

    def _write_children(self, span: Span, entry: Entry, clock: Clock) -> None:
        """Write the child spans of a request: of its batch, or of the steps of its pipeline."""
        if entry.ran is not None:
            self._write_batch(span, entry, entry.ran, clock)
        for part in entry.parts:
            if isinstance(part, StepEntry) and part.ended is not None:
                at = (clock(part.since), clock(part.ended))
                step = self._step(f"step {part.step}", set_span_in_context(span), *at, _attributes(part.ref))
                self._write_children(step, part, clock)
            elif part.ran is not None:  # a part of a request that was too large for one batch
                self._write_batch(span, part, part.ran, clock)

    def _write_batch(self, span: Span, entry: Entry, ran: BatchResult, clock: Clock) -> None:
        context = set_span_in_context(span)
        self._step("queue", context, clock(entry.since), clock(ran.started))
        first = ran.kernels.written_to if ran.kernels is not None else None  # the batch span above the kernel spans
        links = [Link(first)] if isinstance(first, SpanContext) else []
        at = (clock(ran.started), clock(ran.scattered))
        batch = self._step("batch", context, *at, {"lathe.rows": ran.rows}, links)
        within = set_span_in_context(batch)
        self._step("gather", within, clock(ran.started), clock(ran.gathered))
        execute = self._step("execute", within, clock(ran.gathered), clock(ran.executed))
        self._step("scatter", within, clock(ran.executed), clock(ran.scattered))
        if ran.kernels is not None and first is None:
            ran.kernels.written_to = batch.get_span_context()
            self._write_later(ran.kernels.runs, set_span_in_context(execute), clock)

    def _step(
        self,
        name: str,
        context: Context,
        began: int,
        ended: int,
        more: Attributes | None = None,
        links: list[Link] | None = None,
    ) -> Span:
        span = self._tracer.start_span(name, context, attributes=more, links=links, start_time=began)
        span.end(ended)
        return span

    # kernels: a batch may have hundreds, so their spans are written over several turns of the event loop

    def _write_later(self, runs: list[KernelRun], above: Context, clock: Clock) -> None:
        if len(self._kernels) + len(runs) > _KEPT:
            return  # kernels run faster than their spans can be sent
        if runs and not self._kernels:
            asyncio.get_running_loop().call_soon(self._write_some)
        self._kernels.extend(_Kernel(run, above, clock) for run in runs)

    def _write_some(self) -> None:
        self._write_kernels(_AT_ONCE)
        if self._kernels:
            asyncio.get_running_loop().call_soon(self._write_some)

    def _write_kernels(self, most: int) -> None:
        for _ in range(most):
            if not self._kernels:
                return
            run, above, clock = self._kernels.popleft()
            attributes = {"lathe.node": run.label, "lathe.kernel": run.kernel, "lathe.device": run.device}
            self._step(f"kernel {run.op}", above, clock(run.began / 1e9), clock(run.ended / 1e9), attributes)


def _attributes(ref: ModelRef) -> Attributes:
    return {"lathe.model": ref.name, "lathe.version": ref.version}
