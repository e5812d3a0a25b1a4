"""Connections over gRPC: no address may have all of them, and those without calls are closed for new ones."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from lathe.server.access.addresses import client_of, parse_peer, plain_address
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.api.connection.connection_slots import GRACE
from lathe.server.api.grpc import connections
from lathe.server.api.grpc.connections import Connections
from lathe.server.api.grpc.sockets import Peer, peers, shut_down
from tests.server.api.grpc.test_calls import SERVICE, channel, live
from tests.server.api.grpc.wire import grpc_serving, request
from tests.server.fakes import doubler
from tests.server.running import wait_for

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # and settings: an HTTP/2 connection as gRPC expects it
ATTACKER = "127.0.0.2"


class Silent:
    """A connection that is silent after its preface."""

    def __init__(self, address: str, source: str, sent: bytes) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10, source_address=(source, 0))
        self.socket.sendall(sent)

    def is_open(self) -> bool:
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 16):
                continue
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


@contextmanager
def silent(address: str, count: int, source: str = ATTACKER, sent: bytes = PREFACE) -> Iterator[list[Silent]]:
    with ExitStack() as stack:
        found = list[Silent]()
        for _ in range(count):
            found.append(Silent(address, source, sent))
            stack.callback(found[-1].socket.close)
        yield found


def test_a_client_in_this_process_on_a_port_of_the_same_number_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", port)),
            socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as other,
            server.accept()[0],
            server.accept()[0],
        ):
            assert set(peers(port)) == {Peer(*other.getsockname())}


def connections_shown(address: str) -> int:
    """The number of gRPC connections that the metrics of a server show."""
    shown = httpx.get(f"http://{address}/metrics").text
    return int(float(shown.partition("\nlathe_grpc_connections ")[2].partition("\n")[0]))


@pytest.mark.parametrize("sent", [b"", PREFACE])
def test_one_address_cannot_have_all_connections(sent: bytes) -> None:
    """A hundred sockets of one address once had all twenty connections, and gRPC closed the others."""
    limits: dict[str, Any] = {"max_connections": 20, "max_client_connections": 5}
    with grpc_serving({"doubler": doubler()}, **limits) as (running, address), silent(address, 100, sent=sent) as held:
        wait_for(lambda: sum(one.is_open() for one in held) <= 5)
        # gRPC counts a connection that was shut down until its own thread has closed it, and refuses others until then.
        wait_for(lambda: connections_shown(running.address) == 5)
        for _ in range(10):
            assert live(address) is grpc.StatusCode.OK
        assert sum(one.is_open() for one in held) == 5
        assert running.server.config.app.state.grpc.connections.evicted >= 15


def test_many_addresses_cannot_have_all_connections() -> None:
    with grpc_serving({"doubler": doubler()}, max_connections=20) as (_, address), ExitStack() as stack:
        for host in range(2, 32):
            stack.enter_context(silent(address, 1, f"127.0.0.{host}"))
        for _ in range(10):
            assert live(address) is grpc.StatusCode.OK


def test_connections_with_calls_or_a_key_stay(tmp_path: Path) -> None:
    model, message = doubler(), request(np.ones((1, 4), np.float32)).SerializeToString()
    model.gate.clear()
    key, shown = make_key("bot", list(Scope), ["*"], int(time.time()), None)
    write_keys(tmp_path / "keys.json", [key])
    mine = {"metadata": [("authorization", f"Bearer {shown}")], "timeout": 30}
    limits: dict[str, Any] = {"max_connections": 40, "max_client_connections": 4, "inline_budget_us": 0}
    with (
        grpc_serving({"doubler": model}, keys_file=tmp_path / "keys.json", **limits) as (_, address),
        channel(address) as idle,
        channel(address) as busy,
    ):
        idle.unary_unary(SERVICE + "ServerMetadata")(b"", **mine)
        answer = busy.unary_unary(SERVICE + "ModelInfer").future(message, **mine)
        wait_for(model.entered.is_set)
        states: list[grpc.ChannelConnectivity] = []
        idle.subscribe(states.append)
        with silent(address, 30, "127.0.0.1") as held:
            wait_for(lambda: sum(one.is_open() for one in held) == 2)
            model.gate.set()
            assert answer.result()
            assert states == [grpc.ChannelConnectivity.READY]


@pytest.mark.parametrize("seed", range(10))
def test_limits_hold_and_idle_connections_are_closed_for_new_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, connections, now = random.Random(seed), Connections(most=12, each=5), 1.0
    monkeypatch.setattr("lathe.server.api.grpc.connections.time.monotonic", lambda: now)
    there: dict[Peer, None] = {}
    ports = iter(range(1 << 20))
    for _ in range(300):
        now += chance.random() * GRACE
        for _ in range(chance.randrange(8)):
            there[Peer(f"10.0.0.{chance.randrange(4)}", next(ports))] = None
        for peer in chance.sample(list(there), min(len(there), 3)):
            own = connections.of(f"ipv4:{peer.address}:{peer.port}")
            if own.calls and chance.random() < 0.5:
                own.end()
            else:
                own.begin(has_key=chance.random() < 0.3)
        victims = connections.look(there, now)
        kept = [peer for peer in there if peer not in victims]
        held = {peer: connections._found[peer] for peer in there}
        of = [peer.address for peer in kept]
        assert len(kept) <= 12
        assert max(map(of.count, of), default=0) <= 5
        assert len(set(victims)) == len(victims)
        for victim in victims:
            if held[victim].calls or held[victim].has_key:  # then no connection of its client, or of all, was idle
                rivals = [peer for peer in kept if peer.address == victim.address]
                assert all(held[peer].calls or held[peer].has_key for peer in rivals)
        for victim in victims:
            while held[victim].calls:
                held[victim].end()
            del there[victim]
    now += 1
    for one in connections._found.values():
        one.calls = 0
    assert connections.look({}, now + 1) == []
    assert connections.connection_count == 0


@pytest.mark.parametrize(("listens", "calls"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "::1")])
def test_a_connection_is_found_and_shut(listens: str, calls: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    try:
        server = socket.create_server((listens, 0), family=family, dualstack_ipv6=family is socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        port = server.getsockname()[1]
        assert peers(port) == {}
        with socket.create_connection((calls, port)) as client, server.accept()[0] as accepted:
            peer = Peer(calls, client.getsockname()[1])
            assert peers(port) == {peer: accepted.fileno()}
            shut_down(
                port, [(Peer(calls, 1), accepted.fileno()), (peer, client.fileno())]
            )  # neither is that connection
            accepted.sendall(b"there")
            assert client.recv(5) == b"there"
            shut_down(port, [(peer, accepted.fileno())])
            assert client.recv(5) == b""
            accepted.setblocking(True)
            assert accepted.recv(5) == b""


@pytest.mark.parametrize(
    ("peer", "address", "client"),
    [
        ("ipv4:127.0.0.1:53412", "127.0.0.1", "127.0.0.1"),
        ("ipv6:%5B::1%5D:53412", "::1", "::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:53412", "fe80::1", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:53412", "10.0.0.7", "10.0.0.7"),
    ],
)
def test_an_address_has_one_spelling(peer: str, address: str, client: str) -> None:
    assert parse_peer(peer) == (address, 53412)
    assert plain_address(address) == address
    assert client_of(address) == client
    assert parse_peer("unix:/tmp/x") is None


def test_waiting_for_the_processor_does_not_make_scans_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that waited two seconds for other threads once delayed the next one by forty."""
    scans, scan = list[float](), connections.peers

    def starved(port: int) -> dict[Peer, int]:
        time.sleep(0.2 if not scans else 0.0)  # no processor time
        scans.append(time.monotonic())
        return scan(port)

    monkeypatch.setattr(connections, "peers", starved)
    with grpc_serving({"doubler": doubler()}):
        wait_for(lambda: len(scans) >= 3)
    assert scans[1] - scans[0] < 2.0  # 4 seconds, if elapsed time counted
