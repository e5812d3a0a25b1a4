"""Traces: who is recorded, what a trace holds, and that it reaches a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from server.telemetry.tracing import Tracing
from tests.server.data.fakes import FakeModel, doubler
from tests.server.data.running import Running, serving

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def spans(model: FakeModel, share: float, header: str | None) -> dict[str, ReadableSpan]:
    """Ask once; return what was recorded, by name."""
    exporter = InMemorySpanExporter()
    with serving({"m": model}) as running:
        tracing = running.engine.plane.tracing = Tracing("", share, exporter)
        ask(running, header)
        flush(running, tracing)
        return {span.name: span for span in exporter.get_finished_spans()}


def flush(running: Running, tracing: Tracing) -> None:
    """A span ends just after its answer has left, in the same turn of the loop: before any later request is read."""
    assert running.ask("GET", "/v2/health/live").status == 200
    tracing._provider.force_flush()


def ask(running: Running, header: str | None) -> None:
    running.infer("m", BODY, **({"traceparent": header} if header else {}))


def test_a_trace_tells_queue_from_execution_and_goes_on_from_the_caller() -> None:
    found = spans(doubler(), 0.0, f"00-{TRACE}-{CALLER}-01")
    assert found.keys() == {"infer m", "queue", "batch", "gather", "execute", "scatter"}
    whole = found["infer m"]
    assert whole.attributes == {"lathe.model": "m", "lathe.version": 1}
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int(CALLER, 16)
    below = {"queue": whole, "batch": whole, "gather": found["batch"], "execute": found["batch"]}
    for name, above in below.items():
        assert found[name].parent is not None
        assert found[name].parent.span_id == above.context.span_id
        assert above.start_time - 1_000_000 <= found[name].start_time <= found[name].end_time <= above.end_time
    assert found["queue"].end_time == found["batch"].start_time
    assert found["batch"].attributes == {"lathe.rows": 1}


@pytest.mark.parametrize(
    ("share", "header", "recorded"),
    [
        (0.0, None, False),
        (1.0, None, True),
        (1.0, f"00-{TRACE}-{CALLER}-00", False),  # the caller decided against it
        (0.0, f"00-{TRACE}-{CALLER}-01", True),
        (0.0, "nonsense", False),
    ],
)
def test_who_is_recorded(share: float, header: str | None, recorded: bool) -> None:
    assert ("infer m" in spans(doubler(), share, header)) == recorded


def test_a_request_refused_at_the_door_is_recorded() -> None:
    exporter = InMemorySpanExporter()
    with serving({"m": doubler()}, queue_items=1) as running:
        tracing = running.engine.plane.tracing = Tracing("", 1.0, exporter)
        running.registry.resolve("m").batcher.admission.items = 1
        assert running.infer("m", BODY).status == 503
        running.registry.resolve("m").batcher.admission.items = 0
        flush(running, tracing)
        (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok


def test_a_failure_is_marked() -> None:
    model = doubler()
    model.function = lambda tensors: {}[0]
    whole = spans(model, 1.0, None)["infer m"]
    assert not whole.status.is_ok
    assert whole.status.description == "the model failed to execute (KeyError)"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP collector that remembers what it was sent."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(ExportTraceServiceRequest.FromString(body))
            assert self.path == "/v1/traces"
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_has_everything_once_the_server_has_stopped(
    collector: tuple[str, list[ExportTraceServiceRequest]],
) -> None:
    address, got = collector
    with serving({"m": doubler()}, otlp_endpoint=address, trace_share=1.0) as running:
        for index in range(3):
            ask(running, f"00-{index + 1:032x}-{CALLER}-01")
    sent = [span for request in got for found in request.resource_spans for s in found.scope_spans for span in s.spans]
    assert {span.trace_id.hex() for span in sent} == {f"{index + 1:032x}" for index in range(3)}
    assert len(sent) == 18


def test_heads_with_a_trace_are_not_remembered() -> None:
    """Each is new: they would push out those that come again."""
    with serving({"m": doubler()}) as running:
        for _ in range(2):
            ask(running, f"00-{TRACE}-{CALLER}-01")
        with running.connect():
            assert running.hub.heads == {}
