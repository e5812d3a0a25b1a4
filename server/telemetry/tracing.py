"""Traces of requests for OpenTelemetry: one span per request, below it its time in the queue and in its batch, and
below that one per kernel.

A caller's W3C `traceparent` header decides whether its request is recorded; of the others a share is. Spans are written
once a request has ended, from the times its batch noted anyway, so a request that is not recorded costs nothing. Only a
batch with a recorded request stamps its kernels. They are written once for all of the batch's requests: below the first
one's, to which the others' batch spans link.
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

from server.backends.base import KernelRun
from server.batching.entry import Entry, Outcome
from server.batching.execution import Ran
from server.errors import ServerError
from server.pipelines.flow import StepEntry
from server.types import ModelRef

Clock: TypeAlias = Callable[[float], int]  # from monotonic seconds to nanoseconds since 1970
Attributes: TypeAlias = Mapping[str, str | int]
_KEPT = 16_384  # spans that wait to be sent; more are dropped
_AT_ONCE = 16  # kernels written before requests have their turn: each takes about 20 microseconds


class _Kernel(NamedTuple):
    """A span that is yet to be written."""

    run: KernelRun
    above: Context
    clock: Clock


class Tracing:
    """Writes spans to a collector (OTLP over HTTP), in a thread of its own."""

    def __init__(self, endpoint: str, share: float, exporter: SpanExporter | None = None) -> None:
        """``share``: how many of the requests without a `traceparent` are recorded, 0 to 1."""
        resource = Resource.create({"service.name": "lathe"})
        self._provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)), resource=resource)
        exporter = exporter or OTLPSpanExporter(f"{endpoint}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_KEPT))
        self._tracer = self._provider.get_tracer("lathe")
        self._propagator = TraceContextTextMapPropagator()
        self._kernels: deque[_Kernel] = deque()

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
            entry.trace = f"{span.get_span_context().trace_id:032x}"
        return ended

    def close(self) -> None:
        """Send what is left; blocks."""
        self._write_kernels(len(self._kernels))
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
            elif part.ran is not None:  # of a request that was too large for one batch
                self._below(span, part, part.ran, clock)

    def _below(self, span: Span, entry: Entry, ran: Ran, clock: Clock) -> None:
        context = set_span_in_context(span)
        self._step("queue", context, clock(entry.since), clock(ran.started))
        told = ran.kernels.told if ran.kernels is not None else None
        links = [Link(told)] if isinstance(told, SpanContext) else []
        at = (clock(ran.started), clock(ran.scattered))
        batch = self._step("batch", context, *at, {"lathe.rows": ran.rows}, links)
        within = set_span_in_context(batch)
        self._step("gather", within, clock(ran.started), clock(ran.gathered))
        execute = self._step("execute", within, clock(ran.gathered), clock(ran.executed))
        self._step("scatter", within, clock(ran.executed), clock(ran.scattered))
        if ran.kernels is not None and told is None:
            ran.kernels.told = batch.get_span_context()
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

    # kernels: there may be hundreds, and the event loop has requests to answer

    def _write_later(self, runs: list[KernelRun], above: Context, clock: Clock) -> None:
        if len(self._kernels) + len(runs) > _KEPT:
            return  # they come faster than they can be sent
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
            named = {"lathe.node": run.label, "lathe.kernel": run.kernel, "lathe.device": run.device}
            self._step(f"kernel {run.op}", above, clock(run.began / 1e9), clock(run.ended / 1e9), named)


def _named(ref: ModelRef) -> Attributes:
    return {"lathe.model": ref.name, "lathe.version": ref.version}
