"""The memory ledger counts the bytes of unfinished requests on every path, and gets all of them back."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lathe.server.access.scopes import Scope
from lathe.server.api.codec import input_slots
from lathe.server.api.inference.memory_ledger import MemoryLedger
from lathe.server.errors import Overloaded
from lathe.server.steps import Steps
from lathe.server.types import Array
from tests.server.access.test_access import new_key
from tests.server.fakes import doubler, echo
from tests.server.running import infer_request, request, rows, serving, wait_for

MIB = 1 << 20


def test_one_client_gets_half_and_all_get_the_whole() -> None:
    ledger = MemoryLedger(100)
    first = ledger.claim("a", 50)
    with pytest.raises(Overloaded, match="this client"):
        first.add(1)
    assert (first.size, ledger.held, ledger.of("a")) == (50, 50, 50)
    with ledger.claim("b", 30), ledger.claim("c", 20) as third:
        with pytest.raises(Overloaded, match="holds 100 bytes"):
            third.add(1)
        assert ledger.held == 100
    assert (ledger.held, ledger.of("b"), ledger.of("c")) == (50, 0, 0)
    first.release()
    first.release()
    assert ledger.held == 0


def start_of(path: str, version: str = "1.1") -> bytes:
    """The beginning of a request with 600 KiB still to come."""
    size = 600 << 10
    return f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {size + 1}\r\n\r\n".encode() + b" " * size


WAYS = {
    "direct": start_of("/v2/models/doubler/infer"),
    "asgi": start_of("/v2/models/doubler/infer?a"),
    "http/1.0": start_of("/v2/models/doubler/infer", "1.0"),
    "protocol": start_of("/v2/repository/index"),
    "chunked": b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n" % (600 << 10)
    + b" " * (600 << 10),
}


@pytest.mark.parametrize("way", WAYS)
def test_requests_of_every_path_are_counted(way: str) -> None:
    """Of two bodies that do not fit together, the second is refused at once; the first one's bytes are given back."""
    with serving({"doubler": doubler()}, max_receiving=2 * MIB) as running:
        ledger = running.ledger
        with running.connect() as first, running.connect() as second:
            first.send(WAYS[way])
            wait_for(lambda: ledger.held > 500_000)
            second.send(WAYS[way])
            answer = second.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert ledger.held < MIB
        wait_for(lambda: ledger.held == 0)
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200


TEXTS = b"\2\0\0\0ab" * 20_000  # as objects more than a mebibyte


def texts(count: int) -> dict[str, object]:
    item = {"name": "x", "datatype": "BYTES", "shape": [count, 1], "parameters": {"binary_data_size": len(TEXTS)}}
    return {"inputs": [item], "parameters": {"binary_data_output": True}}


def test_texts_count_as_the_objects_that_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """413 if they can never fit, 503 if they do not fit now; no objects are made in either case."""
    real, ledgers, held, made = input_slots.unpack_in_steps, list[MemoryLedger](), list[int](), list[Array]()

    def noted(*arguments: Any) -> Steps[Array]:
        held.append(ledgers[0].held)
        tracemalloc.start()
        array = yield from real(*arguments)
        made.append(array)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        return array

    monkeypatch.setattr(input_slots, "unpack_in_steps", noted)
    with serving({"m": echo("BYTES", max_batch=1 << 20)}, max_receiving=2 * MIB) as running:
        answer = running.infer("m", texts(20_000), TEXTS)
        assert (answer.status, "of a BYTES tensor takes" in answer.error, made) == (413, True, [])
    with serving({"m": echo("BYTES", max_batch=1 << 20)}, max_receiving=4 * MIB) as running:
        ledgers.append(running.ledger)
        assert running.infer("m", texts(20_000), TEXTS).body.endswith(TEXTS)
        claimed, taken = held
        assert taken * 0.9 < claimed - len(TEXTS) < taken * 1.5, "what was claimed is about what was taken"
        wait_for(lambda: running.ledger.held == 0)
        with running.ledger.claim("127.0.0.1", MIB):
            assert running.infer("m", texts(20_000), TEXTS).status == 503
        assert len(made) == 1


def test_the_queue_counts_texts_as_objects() -> None:
    model = echo("BYTES", max_batch=1 << 20)
    with serving({"m": model}, queue_bytes=2 * MIB) as running, running.connect() as first:
        head = json.dumps(texts(20_000)).encode()
        data = request("POST", "/v2/models/m/infer", head + TEXTS, {"Inference-Header-Content-Length": str(len(head))})
        model.gate.clear()
        first.send(data)
        assert model.entered.wait(20)
        assert running.ask_raw(data).status == 503
        model.gate.set()
        assert first.answer().status == 200
        assert running.ask_raw(data).status == 200


def test_a_shape_that_contradicts_its_bytes_is_refused() -> None:
    with serving({"m": echo("BYTES")}) as running:
        assert "expected 1000000000000 elements" in running.infer("m", texts(10**12), TEXTS).error
        assert "got more" in running.infer("m", texts(1), TEXTS).error


def test_each_key_counts_as_a_client(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    one, other = (new_key(keys, [Scope.INFER]) for _ in range(2))
    with serving({"doubler": doubler()}, max_receiving=2 * MIB, keys_file=keys) as running:

        def start(key: str) -> bytes:
            head, _, body = start_of("/v2/models/doubler/infer").partition(b"\r\n\r\n")
            return b"%b\r\nAuthorization: Bearer %b\r\n\r\n%b" % (head, key.encode(), body)

        with running.connect() as first, running.connect() as second, running.connect() as third:
            first.send(start(one))
            wait_for(lambda: running.ledger.held > 500_000)
            second.send(start(one))
            assert second.answer().status == 503
            third.send(start(other))
            wait_for(lambda: running.ledger.held > 1_100_000)


@pytest.mark.parametrize(
    "path", ["/v2/repository/index", "/v2/logging", "/v2/trace/setting", "/v2/repository/models/doubler/load"]
)
def test_management_bodies_are_limited_in_bytes_and_values(path: str) -> None:
    with serving({"doubler": doubler()}) as running:
        assert running.ask("POST", path, b" " * (MIB + 1)).status == 413
        many = running.ask("POST", path, b'{"a": [' + b"[]," * 100_000 + b"1]}")
        assert (many.status, "at most 65536 values" in many.error) == (413, True)
