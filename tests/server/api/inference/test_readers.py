"""Reader threads: turns between clients, cancellation, and what a large body pays for."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from lathe.server.api.codec import payloads
from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.json_limit import MAX_VALUES
from lathe.server.api.inference.reader_threads import TURN_SECONDS, ReaderThreads
from lathe.server.steps import Steps
from tests.server.fakes import doubler, echo
from tests.server.running import infer_request, request, rows, serving, tensor_of, wait_for


def test_clients_take_turns() -> None:
    async def scenario() -> list[str]:
        readers, order, gate = ReaderThreads(1), [], threading.Event()
        first = asyncio.ensure_future(readers.run("greedy", gate.wait))
        await asyncio.sleep(0)
        rest = [asyncio.ensure_future(readers.run(name, order.append, name)) for name in ("greedy",) * 3 + ("small",)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *rest)
        readers.close()
        return order

    assert asyncio.run(scenario()) == ["greedy", "small", "greedy", "greedy"]


def test_cancelled_waiting_work_is_not_run_and_running_work_is_awaited() -> None:
    async def scenario() -> None:
        readers, ran, gate = ReaderThreads(1), [], threading.Event()
        first = asyncio.ensure_future(readers.run("a", gate.wait))
        second = asyncio.ensure_future(readers.run("a", ran.append, 2))
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        await asyncio.sleep(0.05)
        assert second.cancelled()
        assert not first.done()
        gate.set()
        await asyncio.wait([first])
        assert first.cancelled()
        assert await readers.run("a", lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            await readers.run("a", lambda: 1 / 0)
        assert ran == []
        readers.close()

    asyncio.run(scenario())


def test_work_in_steps_lets_others_run_between_its_steps() -> None:
    async def scenario() -> list[str]:
        readers, order = ReaderThreads(1), list[str]()

        def long() -> Steps[str]:
            for _ in range(3):
                time.sleep(TURN_SECONDS)
                order.append("step")
                yield
            return "the end"

        first = asyncio.ensure_future(readers.run_steps("greedy", long()))
        await asyncio.sleep(TURN_SECONDS / 2)
        await readers.run("small", order.append, "small")
        assert await first == "the end"
        left = asyncio.ensure_future(readers.run_steps("greedy", long()))
        await asyncio.sleep(TURN_SECONDS / 2)
        left.cancel()
        await asyncio.wait([left])
        assert left.cancelled()
        await readers.run("small", order.append, "small")
        readers.close()
        return order

    order = asyncio.run(scenario())
    assert order[:2] == ["step", "small"]
    assert order[2:4] == ["step", "step"]
    assert order[4:] in (["step", "small"], ["small"]), "who leaves ends after the step that runs"


def test_large_answers_keep_their_order() -> None:
    """A large answer as JSON, then a small one, on one connection."""
    item = {"name": "x", "datatype": "FP32", "shape": [20_000, 4], "parameters": {"binary_data_size": 320_000}}
    text = json.dumps({"inputs": [item]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    large = request("POST", "/v2/models/doubler/infer", text + rows(20_000).tobytes(), headers)
    with serving({"doubler": doubler(max_batch=65536)}) as running, running.connect() as client:
        client.send((large + infer_request("doubler", rows(1))) * 3)
        for _ in range(3):
            np.testing.assert_array_equal(client.answer().json["outputs"][0]["data"], (rows(20_000) * 2).ravel())
            np.testing.assert_array_equal(tensor_of(client.answer()), rows(1) * 2)


@pytest.mark.parametrize("transport", ["direct", "asgi"])
def test_no_answer_is_written_for_a_disconnected_client(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate, steps = threading.Event(), threading.Event(), list[int]()

    def slow(array: np.ndarray) -> Steps[bytes]:
        entered.set()
        assert gate.wait(20)
        time.sleep(TURN_SECONDS)
        yield
        steps.append(1)
        return b""

    monkeypatch.setattr(payloads, "pack_in_steps", slow)
    with serving({"m": echo("BYTES", max_batch=65536)}, transport) as running:
        blob = b"\x02\0\0\0ab" * 50_000
        item = {"name": "x", "datatype": "BYTES", "shape": [50_000, 1], "parameters": {"binary_data_size": len(blob)}}
        head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
        with running.connect() as client:
            headers = {"Inference-Header-Content-Length": str(len(head))}
            client.send(request("POST", "/v2/models/m/infer", head + blob, headers))
            assert entered.wait(20)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: not running.server.server_state.connections)
        gate.set()
        monkeypatch.undo()
        assert running.infer("m", json.loads(head), blob).status == 200
        assert steps == []


def document(array: np.ndarray) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}
    return json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()


@pytest.mark.parametrize("transport", ["direct", "asgi"])
@pytest.mark.parametrize("wrap", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_large_document_is_read_on_a_reader_thread(
    transport: str, wrap: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noted(codec: Codec, text: bytes) -> object:
        seen.append(threading.current_thread().name)
        return head(codec, text)

    head = Codec.head
    monkeypatch.setattr(Codec, "head", noted)
    with serving({"doubler": doubler(max_batch=65536)}, transport) as running:
        body = wrap(document(rows(20_000)))
        coding = {"Content-Encoding": "gzip"} if wrap is gzip.compress else {}
        answer = running.ask("POST", "/v2/models/doubler/infer", body, coding)
        np.testing.assert_array_equal(tensor_of(answer), rows(20_000) * 2)
        assert [name.startswith("lathe-reader") for name in seen] == [True]
        assert running.ledger.held == 0


def test_answers_keep_their_order_and_do_not_block_other_connections() -> None:
    """A large request, then a small one, on one connection; a small one elsewhere does not wait for the large one."""
    with serving({"doubler": doubler(max_batch=65536)}) as running, running.connect() as client:
        client.send(
            request("POST", "/v2/models/doubler/infer", document(rows(20_000))) + infer_request("doubler", rows(1))
        )
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200
        np.testing.assert_array_equal(tensor_of(client.answer()), rows(20_000) * 2)
        np.testing.assert_array_equal(tensor_of(client.answer()), rows(1) * 2)


@pytest.mark.parametrize("kind", ["BOOL", "BYTES"])
def test_tensors_that_are_copied_are_read_on_a_reader_thread(kind: str) -> None:
    with serving({"m": echo(kind, max_batch=65536)}) as running:
        blob = bytes([1, 0]) * 50_000 if kind == "BOOL" else b"\x02\0\0\0ab" * 50_000
        shape = [len(blob), 1] if kind == "BOOL" else [50_000, 1]
        item = {"name": "x", "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(blob)}}
        document = {"inputs": [item], "parameters": {"binary_data_output": True}}
        for _ in range(3):  # the third would use a request template
            answer = running.infer("m", document, blob)
            assert answer.status == 200
            assert answer.body.endswith(blob)


def test_a_large_request_pays_its_quota_before_its_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(ParsedRequest, "reading", lambda *arguments: (read.append(1), reading(*arguments))[1])
    with serving({"doubler": doubler(max_batch=65536)}, client_rate=1, client_burst=10) as running:
        large, small = document(rows(20_000)), document(rows(1))
        answers = [running.ask("POST", "/v2/models/doubler/infer", body).status for body in (small, large, large)]
        assert (answers, len(read)) == ([200, 429, 429], 1)


reading = ParsedRequest.reading


def test_invalid_requests_pay_their_quota() -> None:
    with serving({"doubler": doubler()}, client_rate=0.01, client_burst=2) as running:
        bad = [running.ask("POST", "/v2/models/doubler/infer", b"[" + b" " * 100_000).status for _ in range(3)]
        assert bad == [400, 400, 429]


def test_a_client_that_disconnects_while_being_read_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = threading.Event(), threading.Event()

    def slow(codec: Codec, text: bytes) -> object:
        entered.set()
        assert gate.wait(20)
        return head(codec, text)

    head = Codec.head
    monkeypatch.setattr(Codec, "head", slow)
    model = doubler(max_batch=65536)
    with serving({"doubler": model}) as running:
        with running.connect() as client:
            client.send(request("POST", "/v2/models/doubler/infer", document(rows(20_000))))
            assert entered.wait(20)
            assert running.ledger.held > 65536
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        wait_for(lambda: not running.server.server_state.connections)
        assert running.ledger.held > 65536  # the running work still has its memory
        gate.set()
        wait_for(lambda: running.ledger.held == 0)
        assert model.batches == []


def test_json_that_python_parses_is_bounded() -> None:
    """Native code reads plain lists of numbers of any size; parsing everything else holds the interpreter lock."""
    most = MAX_VALUES
    with serving({"doubler": doubler(max_batch=65536)}) as running:
        plain = document(rows(MAX_VALUES // 4 + 1))
        assert running.ask("POST", "/v2/models/doubler/infer", plain).status == 200
        odd = [plain.replace(b"[0.0", b"[null", 1), b'{"inputs": [' + b"[]," * most + b"NaN]}", b"[]," * most]
        assert odd[0] != plain
        for body in odd:
            answer = running.ask("POST", "/v2/models/doubler/infer", body)
            assert (answer.status, f"at most {most} values besides" in answer.error) == (413, True)
        wrong = plain.replace(b'"x"', b'"z"')
        assert running.ask("POST", "/v2/models/doubler/infer", wrong).error == "inputs: expected ['x'], got ['z']"
