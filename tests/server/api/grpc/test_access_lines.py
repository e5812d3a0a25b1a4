"""gRPC calls have the same access log lines as HTTP requests."""

from __future__ import annotations

import logging

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.server.api.grpc.wire import grpc_serving, refusal, request, stub
from tests.server.fakes import doubler
from tests.server.running import rows
from tests.server.telemetry.test_logs import PARENT, TRACE, failing, lines, logged, request_lines


def test_failed_calls_have_a_line() -> None:
    with logged() as stream, grpc_serving({"doubler": failing()}) as (_, address), stub(address) as service:
        refusal(service.ModelInfer, request(rows(1), id="call 7"), metadata=[("traceparent", PARENT)])
        refusal(service.ModelMetadata, pb.ModelMetadataRequest(name="none"), metadata=[("x-request-id", "r-1")])
        assert service.ServerLive(pb.ServerLiveRequest()).live
        infer, metadata = request_lines(stream, 2)
    assert (infer["level"], infer["status"], infer["method"]) == ("error", "INTERNAL", "GRPC")
    assert infer["path"] == "/inference.GRPCInferenceService/ModelInfer"
    assert (infer["request_id"], infer["trace_id"], infer["model"]) == ("call 7", TRACE, "doubler")
    assert "KeyError" in infer["error"] and infer["duration_ms"] > 0
    assert infer["client"] == metadata["client"] == "127.0.0.1"  # as over HTTP, without the port
    assert (metadata["status"], metadata["request_id"], metadata["model"]) == ("NOT_FOUND", "r-1", "none")


def test_the_cause_of_a_failure_names_the_request() -> None:
    with logged() as stream, grpc_serving({"doubler": failing()}) as (_, address), stub(address) as service:
        refusal(service.ModelInfer, request(rows(1)), metadata=[("x-request-id", "r-1")])
        (cause,) = [line for line in lines(stream) if line["logger"] == "lathe.batching"]
    assert (cause["request_id"], cause["model"], cause["version"]) == ("r-1", "doubler", 1)


@pytest.mark.parametrize(("choice", "count"), [("off", 0), ("errors", 0), ("all", 3)])
def test_with_the_setting_all_successful_calls_have_a_line(choice: str, count: int) -> None:
    with logged() as stream, grpc_serving({"doubler": doubler()}, access_log=choice) as (_, address):
        with stub(address) as service:
            assert service.ServerLive(pb.ServerLiveRequest()).live
            assert service.ModelInfer(request(rows(1), id="a")).id == "a"
            assert len(list(service.ModelStreamInfer(iter([request(rows(1))] * 2)))) == 2
        found = request_lines(stream, count)
    names = [line["path"].rpartition("/")[2] for line in found]
    assert names == ["ServerLive", "ModelInfer", "ModelStreamInfer"][:count]
    assert all(line["status"] == "OK" for line in found)


def test_lines_logged_during_a_call_name_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with logged() as stream, grpc_serving({"doubler": doubler()}) as (running, address), stub(address) as service:
        control = running.registry

        async def load(model: str, parameters: dict[str, object] | None = None) -> None:
            logging.getLogger("lathe.server.repository").info("loading %s", model)

        monkeypatch.setattr(control, "load", load)
        asked = pb.RepositoryModelLoadRequest(model_name="doubler")
        service.RepositoryModelLoad(asked, metadata=[("x-request-id", "r-9")])
        (line,) = lines(stream, "loading doubler")
    assert line["request_id"] == "r-9"
