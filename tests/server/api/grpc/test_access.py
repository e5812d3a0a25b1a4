"""Keys over gRPC: the same rights as over HTTP, sent as metadata."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from tests.server.api.grpc.wire import grpc_serving, refusal, request, stub, tensor
from tests.server.fakes import doubler

X = np.ones((1, 4), np.float32)


def check_only_scope(need: Scope, call: Callable[..., Any], headers: dict[Scope, dict[str, str]], error: str) -> None:
    """Check that a call is accepted with the key of scope `need` alone, and otherwise refused with the given error."""
    with pytest.raises(triton.InferenceServerException, match="UNAUTHENTICATED"):
        call()
    for scope, shown in headers.items():
        if scope is need:
            call(headers=shown)
        else:
            with pytest.raises(triton.InferenceServerException, match=error):
                call(headers=shown)


def test_each_call_needs_a_key_with_its_scope(tmp_path: Path) -> None:
    made = {scope: make_key("bot", [scope], ["doubler"], 0, None) for scope in (Scope.INFER, Scope.READ, Scope.WRITE)}
    write_keys(tmp_path / "keys.json", [key for key, _ in made.values()])
    headers = {scope: {"authorization": f"Bearer {shown}"} for scope, (_, shown) in made.items()}
    models = {"doubler": doubler(), "other": doubler()}
    serving = grpc_serving(models, keys_file=tmp_path / "keys.json")
    with serving as (_, address), triton.InferenceServerClient(address) as client:
        assert client.is_server_ready()
        calls = {
            Scope.INFER: lambda **more: client.infer("doubler", [tensor("x", X)], **more),
            Scope.READ: lambda **more: client.get_model_config("doubler", **more),
            Scope.WRITE: lambda **more: client.load_model("doubler", **more),
        }
        for need, call in calls.items():
            check_only_scope(need, call, headers, "PERMISSION_DENIED")
        for scope in (Scope.INFER, Scope.READ):  # clients read these before they infer
            assert client.get_model_metadata("doubler", headers=headers[scope]).name == "doubler"
            assert client.is_model_ready("doubler", headers=headers[scope])
        with pytest.raises(triton.InferenceServerException, match="scope 'read' or 'infer'"):
            client.get_model_metadata("doubler", headers=headers[Scope.WRITE])
        with pytest.raises(triton.InferenceServerException, match="scope 'infer' for model 'other'"):
            client.infer("other", [tensor("x", X)], headers=headers[Scope.INFER])
        with pytest.raises(triton.InferenceServerException, match="for all models"):
            client.get_model_repository_index(headers=headers[Scope.READ])


@pytest.mark.parametrize("idle", [False, True])
def test_a_stream_ends_when_its_key_is_revoked(tmp_path: Path, idle: bool) -> None:
    key, shown = make_key("bot", [Scope.INFER], ["doubler"], 0, None)
    other, _ = make_key("other", [Scope.INFER], ["doubler"], 0, None)
    write_keys(tmp_path / "keys.json", [key, other])
    over = threading.Event()

    def requests() -> Iterator[Any]:
        yield request(X)
        while not over.wait(20 if idle else 0.1):
            yield request(X)

    serving = grpc_serving({"doubler": doubler()}, keys_file=tmp_path / "keys.json", poll_interval=0.05)
    with serving as (_, address), stub(address) as calls:
        answers = calls.ModelStreamInfer(requests(), metadata=[("authorization", f"Bearer {shown}")], timeout=20)
        assert next(answers)
        write_keys(tmp_path / "keys.json", [other])
        with pytest.raises(grpc.RpcError) as ended:
            list(answers)
        over.set()
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "not known, or has expired" in ended.value.details()


def test_a_key_for_a_model_cannot_register_a_region_of_that_name(tmp_path: Path) -> None:
    key, shown = make_key("bot", [Scope.ADMIN, Scope.READ], ["doubler"], 0, None)
    write_keys(tmp_path / "keys.json", [key])
    headers = {"authorization": f"Bearer {shown}"}
    serving = grpc_serving({"doubler": doubler()}, keys_file=tmp_path / "keys.json", shared_memory=True)
    with serving as (_, address), triton.InferenceServerClient(address) as client:
        for refused in (
            lambda: client.register_system_shared_memory("doubler", "/doubler", 16, headers=headers),
            lambda: client.unregister_system_shared_memory("doubler", headers=headers),
            lambda: client.get_system_shared_memory_status("doubler", headers=headers),
        ):
            with pytest.raises(triton.InferenceServerException, match=r"PERMISSION_DENIED.*for all models"):
                refused()


def test_no_message_is_received_from_a_caller_without_the_right(tmp_path: Path) -> None:
    """The server answers the head alone: the message never ends, so waiting for it would last for ever."""
    key, shown = make_key("bot", [Scope.READ], ["doubler"], 0, None)
    write_keys(tmp_path / "keys.json", [key])

    def endless() -> Iterator[Any]:
        over.wait(20)
        yield request(X)

    over = threading.Event()
    metadata = [("authorization", f"Bearer {shown}")]
    serving = grpc_serving({"doubler": doubler()}, keys_file=tmp_path / "keys.json")
    with serving as (_, address), grpc.insecure_channel(address) as channel:
        for name in ("ModelInfer", "RepositoryModelLoad", "SystemSharedMemoryRegister"):
            call = channel.stream_unary(f"/inference.GRPCInferenceService/{name}", lambda one: one)
            assert refusal(call, endless())[0] is grpc.StatusCode.UNAUTHENTICATED
            status, text = refusal(call, endless(), metadata=metadata)
            assert status is grpc.StatusCode.PERMISSION_DENIED
            assert text.startswith("key 'bot' does not have scope")
        over.set()


def test_settings_are_read_with_read_and_changed_with_admin(tmp_path: Path) -> None:
    made = {scope: make_key("bot", [scope], ["*"], 0, None) for scope in Scope}
    write_keys(tmp_path / "keys.json", [key for key, _ in made.values()])
    headers = {scope: {"authorization": f"Bearer {shown}"} for scope, (_, shown) in made.items()}
    serving = grpc_serving({"doubler": doubler()}, keys_file=tmp_path / "keys.json")
    with serving as (_, address), triton.InferenceServerClient(address) as client:
        calls = [
            (Scope.READ, lambda **more: client.get_log_settings(**more)),
            (Scope.READ, lambda **more: client.get_trace_settings(**more)),
            (Scope.READ, lambda **more: client.get_trace_settings("doubler", **more)),
            (Scope.ADMIN, lambda **more: client.update_log_settings({"log_error": True}, **more)),
            (Scope.ADMIN, lambda **more: client.update_trace_settings(settings={"trace_rate": None}, **more)),
            (Scope.ADMIN, lambda **more: client.update_trace_settings("doubler", {"trace_rate": None}, **more)),
        ]
        for need, call in calls:
            check_only_scope(need, call, headers, f"PERMISSION_DENIED.*'{need}'")


def test_a_key_for_a_model_reads_the_trace_settings_of_that_model_alone(tmp_path: Path) -> None:
    key, shown = make_key("bot", [Scope.READ], ["doubler"], 0, None)
    write_keys(tmp_path / "keys.json", [key])
    headers = {"authorization": f"Bearer {shown}"}
    models = {"doubler": doubler(), "other": doubler()}
    serving = grpc_serving(models, keys_file=tmp_path / "keys.json")
    with serving as (_, address), triton.InferenceServerClient(address) as client:
        client.get_trace_settings("doubler", headers=headers)
        with pytest.raises(triton.InferenceServerException, match="'read' for model 'other'"):
            client.get_trace_settings("other", headers=headers)
        for call in (client.get_trace_settings, client.get_log_settings):
            with pytest.raises(triton.InferenceServerException, match="'read' for all models"):
                call(headers=headers)


def test_settings_without_admin_are_refused_before_their_values_are_read(tmp_path: Path) -> None:
    key, shown = make_key("bot", [Scope.READ], ["*"], 0, None)
    write_keys(tmp_path / "keys.json", [key])
    metadata = (("authorization", f"Bearer {shown}"),)
    with grpc_serving({}, keys_file=tmp_path / "keys.json") as (_, address), stub(address) as calls:
        message = service_pb2.LogSettingsRequest()
        message.settings["nonsense"].string_param = "no"
        assert refusal(calls.LogSettings, message, metadata=metadata)[0] is grpc.StatusCode.PERMISSION_DENIED
