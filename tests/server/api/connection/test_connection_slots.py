"""Connection slots: clients that hold connections in silence do not block other clients."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.api.connection import connection_slots, protocol, receive_deadline
from lathe.server.api.connection.connection_slots import ConnectionSlot, ConnectionSlots
from lathe.server.api.connection.transfer_rates import AnswerRate
from lathe.server.processes.descriptors import SPARE_CONNECTIONS
from lathe.server.settings import Settings
from tests.server.access.test_tls import SERVER, trusting
from tests.server.fakes import FakeModel, doubler, echo
from tests.server.running import Raw, Running, infer_request, request, rows, serving, wait_for

TLS: dict[str, Any] = {**SERVER}
ROOT = request("GET", "/v2")
ESTABLISHED = 1  # the code in /proc/net/tcp


@contextmanager
def busy_connections(running: Running, model: FakeModel, sources: list[str]) -> Iterator[list[Raw]]:
    """Open connections from these addresses, each waiting for `doubler`; the model runs again at the end."""
    model.gate.clear()
    servable = running.registry.resolve("doubler")
    with ExitStack() as stack:
        held = [stack.enter_context(running.connect(source)) for source in sources]
        for count, raw in enumerate(held, 1):
            raw.send(infer_request("doubler", rows(1)))
            wait_for(lambda count=count: servable.in_flight == count)
        try:
            yield held
        finally:
            model.gate.set()


@contextmanager
def small_server(**settings: Any) -> Iterator[tuple[Running, FakeModel]]:
    model = doubler()
    with serving({"doubler": model}, inline_budget_us=0, **settings) as running:
        yield running, model


def status_of(raw: Raw, data: bytes = ROOT) -> int:
    raw.send(data)
    return raw.answer().status


def is_open(raw: Raw) -> bool:
    raw.socket.settimeout(0.05)
    try:
        return raw.socket.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        raw.socket.settimeout(60)


SILENT = {
    "nothing": b"",
    "half a head": b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: x\r\nx-slow: ",
    "an answered request": b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an answered request without its body": b"POST /v2/zzz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("said", SILENT.values(), ids=SILENT)
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"], ids=["same address", "other address"])
def test_clients_that_reconnect_and_go_silent_do_not_block_others(said: bytes, source: str) -> None:
    with small_server(max_connections=8, header_timeout=5.0) as (running, _):
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                try:
                    with running.connect(source) as raw:
                        raw.send(said)
                        raw.socket.settimeout(1)
                        while raw.socket.recv(4096):
                            continue
                except OSError:
                    pass
                stop.wait(0.02)

        threads = [threading.Thread(target=churn) for _ in range(12)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.3)
            statuses = []
            for _ in range(30):
                with running.connect() as raw:
                    statuses.append(status_of(raw))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert statuses == [200] * 30


def test_one_address_has_at_most_its_number_of_connections() -> None:
    with small_server(max_connections=8, max_client_connections=3) as (running, model):
        with busy_connections(running, model, ["127.0.0.2"] * 3):
            with running.connect("127.0.0.2") as further:
                further.send(ROOT)
                answer = further.answer()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert "this address has reached its limit of 3 connections" in answer.error
                assert further.is_closed()
            with running.connect("127.0.0.3") as other:
                assert status_of(other) == 200
            slots = running.hub.slots
        wait_for(lambda: slots.connection_count == 0)
        with running.connect("127.0.0.2") as later:
            assert status_of(later) == 200


def test_the_default_limit_of_connections_per_address() -> None:
    assert Settings(max_connections=8192).connections_per_client == 2048
    assert Settings(max_connections=20).connections_per_client == 16
    assert Settings(max_connections=4).connections_per_client == 4
    assert Settings(max_connections=4, max_client_connections=9).connections_per_client == 4
    assert Settings(max_connections=8192, max_client_connections=8192).connections_per_client == 8192


def test_health_is_answered_while_all_connections_are_busy() -> None:
    with (
        small_server(max_connections=3) as (running, model),
        busy_connections(running, model, ["127.0.0.2"] * 3),
        ExitStack() as stack,
    ):
        for _ in range(2 * SPARE_CONNECTIONS):
            stack.enter_context(running.connect("127.0.0.3"))
        for path in ("/v2/health/live", "/v2/health/ready"):
            with running.connect("127.0.0.4") as probe:
                assert status_of(probe, request("GET", path)) == 200
                assert probe.is_closed()
        for data in (ROOT, infer_request("doubler", rows(1))):  # so that the second head is remembered
            with running.connect("127.0.0.4") as other:
                assert status_of(other, data) == 503


def test_a_reserved_connection_is_served_once_a_slot_is_free() -> None:
    with small_server(max_connections=1) as (running, model), ExitStack() as stack:
        with busy_connections(running, model, ["127.0.0.2"]):
            late = stack.enter_context(running.connect("127.0.0.3"))
            slots = running.hub.slots
            wait_for(lambda: slots.connection_count == 2)
        wait_for(lambda: slots.connection_count == 1)
        assert status_of(late) == 200
        assert status_of(late, infer_request("doubler", rows(1))) == 200


def test_the_connection_idle_for_longest_is_closed_for_a_new_one() -> None:
    with small_server(max_connections=3) as (running, _), ExitStack() as stack:
        first, second, third = (stack.enter_context(running.connect(f"127.0.0.{n}")) for n in (2, 3, 4))
        for raw in (first, second, third, first):
            assert status_of(raw) == 200
            before = running.hub.now
            wait_for(lambda before=before: running.hub.now > before)
        fourth = stack.enter_context(running.connect("127.0.0.5"))
        assert status_of(fourth) == 200
        assert [is_open(raw) for raw in (first, second, third, fourth)] == [True, False, True, True]


def test_a_full_address_closes_only_its_own_connections() -> None:
    with small_server(max_connections=8, max_client_connections=2) as (running, _), ExitStack() as stack:
        other = stack.enter_context(running.connect("127.0.0.2"))
        assert status_of(other) == 200
        mine = [stack.enter_context(running.connect("127.0.0.3")) for _ in range(3)]
        assert status_of(mine[2]) == 200
        assert [is_open(raw) for raw in (other, *mine)] == [True, False, True, True]


def test_a_connection_with_a_valid_key_is_not_closed_for_others(tmp_path: Path) -> None:
    key, shown = make_key("all", [Scope.INFER, Scope.READ], ["*"], int(time.time()), None)
    write_keys(tmp_path / "keys.json", [key])
    bearer: dict[str, Any] = {"Authorization": f"Bearer {shown}"}
    with small_server(max_connections=2, keys_file=tmp_path / "keys.json") as (running, _), ExitStack() as stack:
        infers, reads = (stack.enter_context(running.connect()) for _ in range(2))
        assert status_of(infers, infer_request("doubler", rows(1), **bearer)) == 200
        assert status_of(reads, request("GET", "/metrics", headers=bearer)) == 200
        for _ in range(5):
            with running.connect("127.0.0.2") as other:
                assert status_of(other) == 503
        assert is_open(infers) and is_open(reads)
        assert status_of(reads, request("GET", "/metrics")) == 401  # the latest request decides
        with running.connect("127.0.0.2") as other:
            assert status_of(other) == 200


def test_a_stalled_body_is_closed_for_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALLED", 0.2)
    heads = [infer_request("doubler", rows(1)), request("POST", "/v2/repository/index", b"{}    ")]
    with small_server(max_connections=2) as (running, _), ExitStack() as stack:
        for head in heads:
            stack.enter_context(running.connect("127.0.0.2")).send(head[:-4])
        time.sleep(0.6)
        with running.connect() as raw:
            assert status_of(raw) == 200


def test_connections_in_their_tls_handshake_count_and_time_out() -> None:
    with serving({"m": doubler()}, **TLS, max_connections=8, header_timeout=1.0) as running, ExitStack() as stack:
        silent = [stack.enter_context(running.connect("127.0.0.2")) for _ in range(100)]
        with httpx.Client(verify=trusting(), trust_env=False) as client:
            assert client.get(f"https://127.0.0.1:{running.port}/v2").status_code == 200
            assert running.hub.slots.connection_count <= 8 + SPARE_CONNECTIONS
        left = [raw for raw in silent if is_open(raw)]
        assert len(left) <= 8 + SPARE_CONNECTIONS
        wait_for(lambda: not any(is_open(raw) for raw in left), 30)


def test_garbage_instead_of_a_handshake_gives_the_slot_back() -> None:
    with serving({"m": doubler()}, **TLS, max_connections=8) as running, running.connect() as raw:
        with httpx.Client(verify=trusting(), trust_env=False) as client:
            assert client.get(f"https://127.0.0.1:{running.port}/v2").status_code == 200
            slots = running.hub.slots
            raw.send(b"GET / HTTP/1.1\r\n\r\n")
            wait_for(lambda: slots.connection_count == 1)
        wait_for(lambda: slots.connection_count == 0)


# rates


@pytest.mark.slow
def test_a_body_below_the_minimum_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_deadline, "ALLOWANCE", 0.5)
    data = infer_request("doubler", rows(100))
    heads = [data, data, request("POST", "/v2/repository/index", b" " * 2000)]  # the second head is remembered
    with small_server(min_receive_rate=1000.0) as (running, _):
        for whole in heads:
            with running.connect() as raw:
                raw.send(whole[:-500])
                assert raw.trickle(whole[-500:], 0.05).status == 408
            with running.connect() as raw:
                assert status_of(raw, whole) in (200, 400)


def test_an_unread_answer_ends_the_connection() -> None:
    with serving({"FP32": echo("FP32")}, write_timeout=0.5) as running, slow_reader(running) as raw:
        raw.send(infer_request("FP32", rows(1, 8 << 20)))
        time.sleep(3)
        assert len(read_to_end(raw)) < 32 << 20


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (8 << 20, {"write_timeout": 0.5}),  # more than the kernel buffers: the rest waits in the server
        (1 << 18, {"keep_alive": 0.5}),  # all of it is in the kernel's buffer, and the connection seems idle
    ],
)
def test_the_kernel_keeps_nothing_of_an_unread_answer(values: int, settings: dict[str, Any]) -> None:
    with serving({"FP32": echo("FP32")}, **settings) as running, slow_reader(running) as raw:
        raw.send(infer_request("FP32", rows(1, values)))
        ends = (running.port, raw.socket.getsockname()[1])
        wait_for(lambda: connections().get(ends) == ESTABLISHED)
        wait_for(lambda: ends not in connections(), seconds=20)


def test_an_idle_connection_whose_answers_arrived_ends_without_reset() -> None:
    with serving({"FP32": echo("FP32")}, keep_alive=0.5) as running, running.connect() as raw:
        raw.send(infer_request("FP32", rows(1, 4)))
        assert raw.answer().status == 200
        assert raw.socket.recv(1) == b""  # and no reset


@pytest.mark.slow
def test_an_answer_read_steadily_may_take_longer_than_the_write_timeout() -> None:
    with serving({"FP32": echo("FP32")}, write_timeout=1.0) as running, slow_reader(running, 1 << 18) as raw:
        raw.send(infer_request("FP32", rows(1, 8 << 20)))
        got, began = 0, time.monotonic()
        while time.monotonic() - began < 3:
            got += len(raw.socket.recv(1 << 17))
            time.sleep(0.02)
        assert got < 20 << 20, "this was to be slow"
        assert got + len(read_to_end(raw)) > 32 << 20


def test_the_minimum_rate_of_reading_counts_after_a_first_pause() -> None:
    flow = AnswerRate(began=0.0, pause=10.0, rate=100.0, left=10_000, read=0.0)
    assert flow.look(9_900, 5.0) == 11.0
    assert flow.look(9_900, 8.0) == 11.0
    assert flow.look(9_800, 9.0) == 12.0
    assert flow.look(5_000, 11.0) == 21.0  # no pause may be longer than the one at the start
    assert flow.look(6_000, 12.0) == 21.0  # a further answer is no progress


def connections() -> dict[tuple[int, int], int]:
    """The system's IPv4 connections: the state of each, by its local and remote port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [(int(own.split(":")[1], 16), int(other.split(":")[1], 16)) for _, own, other, *_ in lines]
    return dict(zip(ports, (int(line[3], 16) for line in lines), strict=True))


@contextmanager
def slow_reader(running: Running, size: int = 1 << 14) -> Iterator[Raw]:
    """A client whose system buffers few unread bytes."""
    raw = running.connect()
    raw.socket.close()
    raw.socket = socket.socket()
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    raw.socket.settimeout(30)
    raw.socket.connect(("127.0.0.1", running.port))
    with raw:
        yield raw


def read_to_end(raw: Raw) -> bytes:
    """The bytes that arrive until the server closes the connection, or sends nothing for a second."""
    found = bytearray()
    raw.socket.settimeout(1)
    try:
        while data := raw.socket.recv(1 << 20):
            found += data
    except OSError:
        pass
    return bytes(found)


# bookkeeping


class Stub:
    """A connection that has sent a request."""

    def __init__(self, clock: Iterator[int]) -> None:
        self.last_seen = float(next(clock))
        self.is_spare = False


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_slots_agree_after_any_sequence_of_events(seed: int) -> None:
    chance, clock = random.Random(seed), iter(range(1 << 30))
    slots = ConnectionSlots(most=12, each=5)
    there: dict[ConnectionSlot, str] = {}
    for _ in range(2000):
        slots._scanned = -1.0
        if chance.random() < 0.5 or not there:
            client = chance.choice("abcd")
            made: list[ConnectionSlot] = []
            slot = slots.take(client, lambda made=made: there.pop(made[0]))  # type: ignore[misc]
            made.append(slot)
            there[slot] = client
        else:
            slot = chance.choice(list(there))
            if chance.random() < 0.4:
                slot.free()
                slot.free()
                del there[slot]
            elif slot.connection is None:
                assert slot.on_request(Stub(clock)) is not slot.reserved
            else:
                connection: Any = slot.connection
                connection.is_spare, connection.last_seen = chance.random() < 0.5, float(next(clock))
        seated = [client for slot, client in there.items() if not slot.reserved]
        assert len(seated) == slots._taken <= 12
        assert max(map(seated.count, "abcd")) <= 5
        assert slots.connection_count == len(there)
        silent = [slot for slot in there if slot.connection is None and not slot.reserved]
        assert list(slots._silent) == silent, "oldest first"
    for slot in list(there):
        slot.free()
    assert not (slots._taken or slots._clients or slots._silent or slots._speaking or slots._reserve)


def two_slots_taken_three_times() -> tuple[ConnectionSlots, list[str]]:
    """Slots for two connections, taken by one that sent a request and by two silent ones; and which were closed."""
    slots, dropped = ConnectionSlots(most=2, each=2), list[str]()
    asked_once = slots.take("a", lambda: dropped.append("asked"))
    stub = Stub(iter([0]))
    stub.is_spare = True
    assert asked_once.on_request(stub)
    slots.take("b", lambda: dropped.append("silent"))
    slots.take("c", lambda: dropped.append("third"))
    return slots, dropped


def test_a_silent_connection_is_closed_before_one_that_has_sent_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_slots, "GRACE", -1.0)
    _, dropped = two_slots_taken_three_times()
    assert dropped == ["silent"]


def test_a_new_silent_connection_is_closed_after_one_that_sent_a_request() -> None:
    slots, dropped = two_slots_taken_three_times()
    slots.take("d", lambda: dropped.append("fourth"))
    assert dropped == ["asked", "silent"]
