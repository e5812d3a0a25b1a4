"""Traces: which requests are recorded, their spans down to kernels, and their export to a collector."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lathe.server.backends.base import KernelRun
from lathe.server.telemetry.tracing import Tracing
from tests.server.backends.test_graph_backend import dense, load
from tests.server.fakes import FakeModel, doubler
from tests.server.running import Running, infer_request, rows, serving, wait_for

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def spans(model: FakeModel, share: float, header: str | None) -> dict[str, ReadableSpan]:
    """Send one request; return the recorded spans by name."""
    exporter = InMemorySpanExporter()
    with serving({"m": model}) as running:
        tracing = running.engine.plane.tracing = Tracing("", share, exporter)
        ask(running, header)
        flush(running, tracing)
        return {span.name: span for span in exporter.get_finished_spans()}


def flush(running: Running, tracing: Tracing) -> None:
    """A span ends just after its answer was sent, in the same turn of the loop: before any later request is read."""
    assert running.ask("GET", "/v2/health/live").status == 200
    tracing._provider.force_flush()


def ask(running: Running, header: str | None) -> None:
    running.infer("m", BODY, **({"traceparent": header} if header else {}))


def test_a_trace_separates_queue_from_execution_and_continues_the_callers() -> None:
    found = spans(doubler(), 0.0, f"00-{TRACE}-{CALLER}-01")
    assert found.keys() == {"infer m", "queue", "batch", "gather", "execute", "scatter"}
    whole = found["infer m"]
    assert whole.attributes == {"lathe.model": "m", "lathe.version": 1}
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int(CALLER, 16)
    parents = {"queue": whole, "batch": whole, "gather": found["batch"], "execute": found["batch"]}
    for name, above in parents.items():
        assert found[name].parent is not None
        assert found[name].parent.span_id == above.context.span_id
        assert above.start_time - 1_000_000 <= found[name].start_time <= found[name].end_time <= above.end_time
    assert found["queue"].end_time == found["batch"].start_time
    assert found["batch"].attributes == {"lathe.rows": 1}


def children_of(found: list[ReadableSpan], above: ReadableSpan) -> list[ReadableSpan]:
    """The spans whose parent is `above`, by their begin."""
    children = [span for span in found if span.parent is not None and span.parent.span_id == above.context.span_id]
    return sorted(children, key=lambda span: span.start_time)


def test_a_trace_of_a_compiled_model_includes_its_kernels(tmp_path: Path) -> None:
    model: Any = load(dense(), tmp_path)
    model.gate = threading.Event()  # every model in these tests has a gate
    plan = model._session.profile({"x": rows(1)}, runs=1).nodes
    exporter = InMemorySpanExporter()
    with serving({"m": model}) as running:
        tracing = running.engine.plane.tracing = Tracing("", 0.0, exporter)
        ask(running, f"00-{TRACE}-{CALLER}-01")
        flush(running, tracing)
    found = exporter.get_finished_spans()
    (batch,) = [span for span in found if span.name == "batch"]
    (execute,) = [span for span in children_of(found, batch) if span.name == "execute"]
    kernels = children_of(found, execute)
    assert [(span.name, span.attributes) for span in kernels] == [
        (f"kernel {node.op}", {"lathe.node": node.label, "lathe.kernel": node.kernel, "lathe.device": "cpu"})
        for node in plan
    ]
    assert len(kernels) >= 2
    assert {span.context.trace_id for span in kernels} == {int(TRACE, 16)}
    slack = 1_000  # nanoseconds: spans are converted to seconds as floats
    for span in kernels:
        assert execute.start_time - slack <= span.start_time <= span.end_time <= execute.end_time + slack
    for span, later in itertools.pairwise(kernels):
        assert span.end_time <= later.start_time + slack


@dataclass(frozen=True)
class FakeKernelRun:
    """What a fake kernel reports about itself."""

    label: str
    op: str
    kernel: str
    device: str
    began: int
    ended: int


class ManyKernels(FakeModel):
    """A model with three hundred kernels; counts how often its kernels were requested."""

    asked = 0

    def recorded(self, kernels: list[KernelRun]) -> FakeModel:
        self.asked += 1
        kernels += [FakeKernelRun(f"node {index}", "Add", "loop", "cpu", index, index + 1) for index in range(300)]
        return self


def model_with_many_kernels() -> ManyKernels:
    model: Any = doubler()
    model.__class__ = ManyKernels
    return model


def test_kernels_are_not_recorded_without_a_traced_request() -> None:
    model = model_with_many_kernels()
    found = spans(model, 0.0, None)
    assert (found, model.asked, model.batches) == ({}, 0, [1])


def test_kernels_that_cannot_be_written_in_time_are_left_out_by_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lathe.server.telemetry.tracing._KEPT", 700)
    monkeypatch.setattr(Tracing, "_write_some", lambda tracing: None)  # the event loop has other things to do
    model, exporter = model_with_many_kernels(), InMemorySpanExporter()
    with serving({"m": model}) as running:
        tracing = running.engine.plane.tracing = Tracing("", 0.0, exporter)
        for _ in range(5):
            ask(running, f"00-{TRACE}-{CALLER}-01")
        flush(running, tracing)
        assert len(tracing._kernels) == 600
        assert sum(span.name == "batch" for span in exporter.get_finished_spans()) == 5


def test_the_kernels_of_a_batch_are_written_once_and_linked() -> None:
    model, exporter = model_with_many_kernels(), InMemorySpanExporter()
    with serving({"m": model}) as running, running.connect() as raw:
        tracing = running.engine.plane.tracing = Tracing("", 0.0, exporter)
        header = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        model.gate.clear()
        raw.send(infer_request("m", rows(1)))
        assert model.entered.wait(20)
        raw.send(infer_request("m", rows(1), **header) * 2 + infer_request("m", rows(1)))
        wait_for(lambda: running.registry.resolve("m").in_flight == 4)
        model.gate.set()
        assert [raw.answer().status for _ in range(4)] == [200] * 4
        wait_for(lambda: not tracing._kernels)
        flush(running, tracing)
    assert (model.batches, model.asked) == ([1, 3], 1)
    found = exporter.get_finished_spans()
    first, second = [span for span in found if span.name == "batch"]
    assert first.links == () and [link.context for link in second.links] == [first.context]
    (execute,) = [span for span in children_of(found, first) if span.name == "execute"]
    kernels = [span for span in found if span.name == "kernel Add"]
    assert len(kernels) == 300 and children_of(found, execute) == kernels


def test_the_parts_of_a_split_request_are_in_its_trace() -> None:
    model, exporter = model_with_many_kernels(), InMemorySpanExporter()
    with serving({"m": model}) as running, running.connect() as raw:
        tracing = running.engine.plane.tracing = Tracing("", 1.0, exporter)
        raw.send(infer_request("m", rows(20)))
        assert raw.answer().status == 200
        wait_for(lambda: not tracing._kernels)
        flush(running, tracing)
    found = exporter.get_finished_spans()
    (whole,) = [span for span in found if span.name == "infer m"]
    assert [span.name for span in children_of(found, whole)].count("batch") == len(model.batches) == 3
    assert sum(span.name == "kernel Add" for span in found) == 3 * 300


@pytest.mark.parametrize(
    ("share", "header", "recorded"),
    [
        (0.0, None, False),
        (1.0, None, True),
        (1.0, f"00-{TRACE}-{CALLER}-00", False),  # the caller decided against recording
        (0.0, f"00-{TRACE}-{CALLER}-01", True),
        (0.0, "nonsense", False),
    ],
)
def test_which_requests_are_recorded(share: float, header: str | None, recorded: bool) -> None:
    assert ("infer m" in spans(doubler(), share, header)) == recorded


def test_a_request_refused_before_the_queue_is_recorded() -> None:
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
    """An OTLP collector that stores the requests it gets."""
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


def test_the_collector_has_all_spans_when_the_server_has_stopped(
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
    """Each is new: they would evict heads that are repeated."""
    with serving({"m": doubler()}) as running:
        for _ in range(2):
            ask(running, f"00-{TRACE}-{CALLER}-01")
        with running.connect():
            assert running.hub.heads == {}
