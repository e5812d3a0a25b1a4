"""The bytes of unfinished requests: counted for every way in, and given back whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.access.scopes import Scope
from server.api.ledger import Ledger
from server.errors import Overloaded
from tests.server.access.test_access import new_key
from tests.server.data.fakes import doubler
from tests.server.data.running import infer_request, rows, serving, wait_for

MIB = 1 << 20


def test_one_client_gets_half_and_all_get_the_whole() -> None:
    ledger = Ledger(100)
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
    """The beginning of a request that will have 600 KiB more."""
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
def test_every_way_in_is_counted(way: str) -> None:
    """Of two bodies that do not fit together, the second is refused at once; the first one's place is given back."""
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


def test_keys_are_clients(tmp_path: Path) -> None:
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
def test_management_takes_a_mebibyte_and_few_values(path: str) -> None:
    with serving({"doubler": doubler()}) as running:
        assert running.ask("POST", path, b" " * (MIB + 1)).status == 413
        many = running.ask("POST", path, b'{"a": [' + b"[]," * 100_000 + b"1]}")
        assert (many.status, "at most 65536 values" in many.error) == (413, True)
