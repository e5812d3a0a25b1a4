"""Concurrent calls: no client may have all of them, and silent ones are ended for new ones."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.api.grpc.calls import RESERVE, Call, Calls
from lathe.server.errors import Overloaded, ServerError
from tests.server.api.grpc.wire import grpc_serving, request
from tests.server.fakes import doubler
from tests.server.running import wait_for

SERVICE = "/inference.GRPCInferenceService/"
CLIENT = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


@contextmanager
def channel(address: str) -> Iterator[grpc.Channel]:
    """A channel with its own connection."""
    with grpc.insecure_channel(address, CLIENT) as opened:
        yield opened


class Silent:
    """A call whose client sends its head, and messages only when the test says so."""

    def __init__(self, opened: grpc.Channel, name: str = "ModelStreamInfer", **options: Any) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()
        self.call = opened.stream_stream(SERVICE + name)(iter(self.messages.get, None), **options)
        self.ended = threading.Event()
        self.call.add_callback(self.ended.set)

    def close(self) -> None:
        self.call.cancel()
        self.messages.put(None)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def live(address: str) -> grpc.StatusCode:
    return status(address, "ServerLive", b"")


def status(address: str, name: str, message: bytes, **options: Any) -> grpc.StatusCode:
    """Make one call as another client; return its status."""
    with channel(address) as opened:
        try:
            opened.unary_unary(SERVICE + name)(message, timeout=20, **options)
        except grpc.RpcError as error:
            found: grpc.StatusCode = error.code()
            return found
    return grpc.StatusCode.OK


def calls_in_use(running: Any) -> int:
    calls: Calls = running.server.config.app.state.grpc._calls
    return calls._taken


@pytest.mark.parametrize("name", ["ModelStreamInfer", "ModelInfer", "ModelReady"])
def test_silent_calls_do_not_block_others(name: str) -> None:
    """Four connections with four streams each once had all sixteen calls, and another client none."""
    infer = request(np.ones((1, 4), np.float32)).SerializeToString()
    with grpc_serving({"doubler": doubler()}, max_connections=16) as (running, address), ExitStack() as stack:
        connections = [stack.enter_context(channel(address)) for _ in range(8)]
        silent = [stack.enter_context(Silent(opened, name)) for opened in connections for _ in range(4)]
        wait_for(lambda: sum(call.ended.is_set() for call in silent) == 16)
        for _ in range(10):
            assert live(address) is grpc.StatusCode.OK
            assert status(address, "ModelInfer", infer) is grpc.StatusCode.OK
        codes = {call.call.code() for call in silent if call.ended.is_set()}
        assert codes == {grpc.StatusCode.UNAVAILABLE}
        assert calls_in_use(running) <= 16
    assert calls_in_use(running) == 0


def test_running_calls_of_one_client_leave_room_for_health_checks(tmp_path: Path) -> None:
    model, message = doubler(), request(np.ones((1, 4), np.float32)).SerializeToString()
    model.gate.clear()
    keys, shown = zip(*(make_key(name, list(Scope), ["*"], int(time.time()), None) for name in "ab"), strict=True)
    write_keys(tmp_path / "keys.json", list(keys))
    mine, others = ({"metadata": [("authorization", f"Bearer {key}")]} for key in shown)
    limits: dict[str, Any] = {"max_connections": 40, "max_client_connections": 3, "inline_budget_us": 0}
    limits["keys_file"] = tmp_path / "keys.json"
    with grpc_serving({"doubler": model}, **limits) as (running, address), channel(address) as opened:
        infer = opened.unary_unary(SERVICE + "ModelInfer")
        busy = [infer.future(message, timeout=30, **mine) for _ in range(3)]
        servable = running.registry.resolve("doubler")
        wait_for(lambda: servable.in_flight == 3)
        assert status(address, "ModelReady", b"", **mine) is grpc.StatusCode.UNAVAILABLE
        assert status(address, "ServerLive", b"", **mine) is grpc.StatusCode.OK
        assert status(address, "ModelReady", b"", **others) is grpc.StatusCode.OK
        model.gate.set()
        assert all(call.exception() is None for call in busy)
        assert status(address, "ModelReady", b"", **mine) is grpc.StatusCode.OK


@pytest.mark.slow
def test_a_stream_with_a_pending_answer_is_not_idle() -> None:
    model, message = doubler(), request(np.ones((1, 4), np.float32)).SerializeToString()
    model.gate.clear()
    limits: dict[str, Any] = {"max_connections": 16, "grpc_stream_idle": 1.0, "inline_budget_us": 0}
    with (
        grpc_serving({"doubler": model}, **limits) as (_, address),
        channel(address) as opened,
        Silent(opened) as stream,
    ):
        stream.messages.put(message)
        wait_for(model.entered.is_set)
        with Silent(opened) as idle:
            assert idle.ended.wait(10), "too long"
            assert idle.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        time.sleep(2.5)
        assert not stream.ended.is_set()
        model.gate.set()
        assert next(stream.call)
        assert stream.ended.wait(10), "it is idle now"


def test_a_call_without_its_message_ends() -> None:
    with grpc_serving({}, body_timeout=0.5) as (_, address), channel(address) as opened:
        with Silent(opened, "ServerLive") as silent:
            assert silent.ended.wait(10)
            assert silent.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with Silent(opened, "ServerLive") as silent:
            silent.messages.put(None)
            assert silent.ended.wait(10)
            assert silent.call.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_idle_connections_end() -> None:
    said = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
    with grpc_serving({}, header_timeout=1.0, keep_alive=1.0) as (_, address), ExitStack() as stack:
        host, _, port = address.rpartition(":")
        for text in (b"", said):
            opened = stack.enter_context(socket.create_connection((host, int(port)), timeout=15))
            opened.sendall(text)
            while opened.recv(4096):
                continue


def test_an_active_client_keeps_its_connection_beyond_the_maximum_age() -> None:
    ages: dict[str, Any] = {"grpc_max_connection_age": 0.5, "grpc_max_connection_age_grace": 5.0}
    with grpc_serving({"doubler": doubler()}, **ages) as (_, address), channel(address) as opened:
        call = opened.unary_unary(SERVICE + "ServerLive")
        for _ in range(20):
            call(b"", timeout=10, wait_for_ready=True)
            time.sleep(0.1)


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_calls_agree_after_any_sequence_of_events(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, calls = random.Random(seed), Calls(most=12, each=5)
    clock = iter(range(1 << 30))
    monkeypatch.setattr("asyncio.get_running_loop", lambda: type("Loop", (), {"time": lambda _: float(next(clock))})())
    there: list[Call] = []
    monkeypatch.setattr(Call, "end", lambda self, _: there.remove(self))
    for _ in range(2000):
        if chance.random() < 0.5 or not there:
            client, health = chance.choice("abcd"), chance.random() < 0.2
            try:
                there.append(calls.enter(client, 60.0, has_key=client in "ab", is_health=health))
            except Overloaded:
                busy = [call for call in there if not call.reserved]
                assert len(busy) == 12 or sum(call.client == client for call in busy) == 5
                assert not health
        else:
            call = chance.choice(there)
            match chance.randrange(4):
                case 0:
                    calls.stop_waiting(call)
                    calls.leave(call)
                    there.remove(call)
                case 1:
                    calls.wait(call)
                case 2:
                    calls.stop_waiting(call)
                case 3:
                    call.pending = chance.randrange(2)
        seated = [call.client for call in there if not call.reserved]
        assert len(seated) == calls._taken <= 12
        assert max(map(seated.count, "abcd")) <= 5
        assert len(there) - len(seated) == len(calls._reserve) <= RESERVE
    for call in there:
        calls.stop_waiting(call)
        calls.leave(call)
    assert not (calls._taken or calls._clients or calls._waiting or calls._reserve)


def test_a_new_call_does_not_end_calls_of_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(most=1, each=1)
    ends: list[ServerError] = []
    mine = calls.enter("key", 60.0, has_key=True)
    monkeypatch.setattr(Call, "end", lambda _, error: ends.append(error))
    calls._waiting[mine] = None
    with pytest.raises(Overloaded, match="limit of 1 calls"):
        calls.enter("address", 60.0, has_key=False)
    assert not ends
