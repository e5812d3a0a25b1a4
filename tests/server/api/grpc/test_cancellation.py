"""Deadlines, cancelled calls, full queues, health and stopping."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from typer.testing import CliRunner

from lathe.server.api.grpc.messages import HEALTH, message_class
from lathe.server.cli.app import app
from lathe.server.settings import Settings
from tests.server.api.grpc.wire import grpc_serving, refusal, request, stub
from tests.server.batching.test_endless_executions import FOREVER, Endless
from tests.server.fakes import FakeModel, application, doubler
from tests.server.running import rows, wait_for

HealthRequest = message_class(HEALTH.message_types_by_name["HealthCheckRequest"])
HealthResponse = message_class(HEALTH.message_types_by_name["HealthCheckResponse"])
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


@pytest.fixture
def held() -> Iterator[FakeModel]:
    """A model whose executions wait until the gate is opened."""
    model = doubler()
    model.gate.clear()
    yield model
    model.gate.set()


def test_a_cancelled_call_is_removed_from_the_queue(held: FakeModel) -> None:
    with grpc_serving({"doubler": held}) as (running, address), stub(address) as service:
        first = service.ModelInfer.future(request(rows(1)))
        assert held.entered.wait(10)
        second = service.ModelInfer.future(request(rows(2)))
        batcher = running.registry.resolve("doubler").batcher
        wait_for(lambda: len(batcher.queue) == 1)
        second.cancel()
        wait_for(lambda: len(batcher.queue) == 0)
        held.gate.set()
        assert first.result(10).raw_output_contents[0] == (rows(1) * 2).tobytes()
        assert held.batches == [1]
        assert batcher.stats.cancelled == 1


def test_the_entry_has_the_deadline_of_the_call(held: FakeModel) -> None:
    with grpc_serving({"doubler": held}) as (running, address), stub(address) as service:
        first = service.ModelInfer.future(request(rows(1)))
        assert held.entered.wait(10)
        code, _ = refusal(service.ModelInfer, request(rows(2)), timeout=0.2)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: len(running.registry.resolve("doubler").batcher.queue) == 0)
        held.gate.set()
        first.result(10)
        assert held.batches == [1]


def test_the_timeout_of_the_request_counts_too(held: FakeModel) -> None:
    with grpc_serving({"doubler": held}) as (_, address), stub(address) as service:
        first = service.ModelInfer.future(request(rows(1)))
        assert held.entered.wait(10)
        late = request(rows(2))
        late.parameters["timeout"].int64_param = 50_000
        code, details = refusal(service.ModelInfer, late)
        assert code is grpc.StatusCode.UNAVAILABLE  # as with Triton; over HTTP 503
        assert "timeout" in details
        held.gate.set()
        first.result(10)


def test_a_call_that_may_not_end_gets_no_retry_after() -> None:
    """Over HTTP this is 503 without Retry-After: the request would not end if it were sent again either."""
    model = Endless()
    with grpc_serving({"doubler": model}) as (_, address), stub(address) as service:
        endless = request(FOREVER)
        endless.parameters["timeout"].int64_param = 50_000
        with pytest.raises(grpc.RpcError) as caught:
            service.ModelInfer(endless, timeout=20)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
        assert model.broken_off == 1


def test_a_full_queue_says_when_to_retry(held: FakeModel) -> None:
    with grpc_serving({"doubler": held}, queue_items=1) as (_, address), stub(address) as service:
        first = service.ModelInfer.future(request(rows(1)))
        assert held.entered.wait(10)
        with pytest.raises(grpc.RpcError) as caught:
            service.ModelInfer(request(rows(1)), timeout=10)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "the queue is full" in error.details()
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        held.gate.set()
        first.result(10)


def test_cancelling_a_stream_cancels_its_requests(held: FakeModel) -> None:
    with grpc_serving({"doubler": held}, max_pipeline=4) as (running, address), stub(address) as service:
        over = threading.Event()

        def requests() -> Iterator[Any]:
            for _ in range(10):
                yield request(rows(1))
            over.wait(10)

        call = service.ModelStreamInfer(requests())
        assert held.entered.wait(10)
        batcher = running.registry.resolve("doubler").batcher
        wait_for(lambda: batcher.admission.items == 4)  # the other six of the ten are not read yet
        call.cancel()
        over.set()
        wait_for(lambda: len(batcher.queue) == 0)
        held.gate.set()
        wait_for(lambda: batcher.admission.items == 0)
        assert sum(held.batches) <= 4


def health(channel: grpc.Channel, service: str = "") -> int:
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check", HealthRequest.SerializeToString, HealthResponse.FromString
    )
    return call(HealthRequest(service=service), timeout=10).status


def test_health_is_checked_and_watched() -> None:
    with grpc_serving({}) as (running, address), grpc.insecure_channel(address) as channel:
        assert health(channel) == health(channel, "inference.GRPCInferenceService") == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health(channel, "other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch", HealthRequest.SerializeToString, HealthResponse.FromString
        )
        stranger = watch(HealthRequest(service="other"), timeout=10)
        assert next(stranger).status == SERVICE_UNKNOWN
        stranger.cancel()
        seen = watch(HealthRequest(), timeout=10)
        assert next(seen).status == SERVING
        running.engine.plane.draining = True
        assert next(seen).status == NOT_SERVING
        assert health(channel) == NOT_SERVING


def test_health_watchers_leave_calls_for_others() -> None:
    """Watching needs no key, so watchers get a small share of the calls, and one address half of that."""
    with grpc_serving({}, max_connections=40) as (_, address), grpc.insecure_channel(address) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch", HealthRequest.SerializeToString, HealthResponse.FromString
        )
        seen = [watch(HealthRequest(), timeout=30) for _ in range(5)]
        assert [next(one).status for one in seen] == [SERVING] * 5
        for _ in range(40):
            with pytest.raises(grpc.RpcError) as caught:
                next(watch(HealthRequest(), timeout=10))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "at most 5 watching calls of one address" in caught.value.details()
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            assert health(other) == SERVING
        seen.pop().cancel()
        wait_for(lambda: _may_watch(watch))


def _may_watch(watch: Any) -> bool:
    call = watch(HealthRequest(), timeout=10)
    try:
        return next(call).status == SERVING
    except grpc.RpcError:
        return False


def test_sigterm_answers_accepted_calls_and_ends_idle_streams() -> None:
    command = [sys.executable, "-m", "tests.server.api.grpc.standalone", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = f"127.0.0.1:{int(process.stdout.readline())}"
            over = threading.Event()

            def idle() -> Iterator[Any]:
                yield request(rows(1))
                over.wait(20)

            with stub(address) as service:
                stream = service.ModelStreamInfer(idle())
                assert next(stream).infer_response.model_name == "doubler"
                accepted = service.ModelInfer.future(request(rows(1)))
                time.sleep(0.1)
                process.send_signal(signal.SIGTERM)
                assert accepted.result(10).raw_output_contents
                with pytest.raises(grpc.RpcError) as caught:
                    next(stream)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert process.wait(10) == 0
            over.set()
        finally:
            process.kill()


def test_cancelling_works_on_the_asyncio_channel(held: FakeModel) -> None:
    async def leave(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request(rows(1)))
            assert await asyncio.to_thread(held.entered.wait, 60)
            assert not call.done()
            call.cancel()

    with grpc_serving({"doubler": held}) as (running, address):
        asyncio.run(leave(address))
        wait_for(lambda: running.registry.resolve("doubler").batcher.stats.cancelled == 1)


def test_a_port_in_use_is_reported() -> None:
    with grpc_serving({}) as (_, address):
        app, _, _ = application(Settings(port=0, grpc_port=int(address.rpartition(":")[2])), {})

        async def start() -> None:
            async with app.router.lifespan_context(app):
                pass

        with pytest.raises(RuntimeError, match="bind"):
            asyncio.run(start())


def test_versions_and_aliases_mean_the_same_as_over_http() -> None:
    """model_version is an alias or a number, as over HTTP."""
    with grpc_serving({"doubler": doubler()}) as (_, address), stub(address) as service:
        for version in ("", "1", "live"):
            assert service.ModelInfer(request(rows(1), model_version=version), timeout=10).model_version == "1"
        assert list(service.ModelMetadata(pb.ModelMetadataRequest(name="doubler", version="live")).versions) == ["1"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [name for name in sys.modules if name.startswith("lathe.server.api.grpc.")]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(app, ["serve", "--model-repo", str(tmp_path), "--grpc-port", "0"])
    assert result.exit_code == 1
    assert "pip install '.[grpc]'" in result.output
