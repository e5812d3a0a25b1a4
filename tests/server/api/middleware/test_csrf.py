"""Pages of other origins cannot change a server that only the browser of their reader reaches.

A browser sends the requests of these tests without a preflight ("simple" requests), and no page can leave out or
change Host, Origin and Sec-Fetch-Site."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe.server.access.authority import Mode
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.api.connection.hosts import served_names
from lathe.server.telemetry.logs import set_level
from tests.server.fakes import doubler
from tests.server.running import Running, infer_request, rows, serving

EVIL = "http://evil.example"
HERE = "http://localhost"
TEXT = {"Content-Type": "text/plain"}
CHANGES = ["/v2/logging", "/v2/repository/models/doubler/unload", "/v2/models/doubler/infer"]
FOREIGN = {
    "an origin": {"Origin": EVIL},
    "an opaque origin": {"Origin": "null"},
    "another port": {"Origin": f"{HERE}:3000"},
    "cross-site": {"Sec-Fetch-Site": "cross-site"},
    "same-site": {"Sec-Fetch-Site": "same-site", "Origin": f"{HERE}:3000"},
    "cross-site in spite of an origin": {"Sec-Fetch-Site": "cross-site", "Origin": HERE},
}
OWN = {
    "no page": {},
    "its own": {"Origin": HERE},
    "its own, with the port": {"Origin": f"{HERE}:80"},
    "same-origin": {"Sec-Fetch-Site": "same-origin", "Origin": HERE},
    "the user": {"Sec-Fetch-Site": "none"},
}


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving({"doubler": doubler()}, request.param) as running:
        yield running


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("path", CHANGES)
def test_a_page_of_another_origin_changes_nothing(server: Running, path: str, headers: dict[str, str]) -> None:
    set_level(logging.INFO)
    answer = server.ask("POST", path, b'{"log_info": false}', {**TEXT, **headers})
    assert (answer.status, "LATHE_CORS_ORIGINS" in answer.error) == (403, True)
    assert server.ask("GET", "/v2/logging").json["log_info"] is True


@pytest.mark.parametrize("headers", OWN.values(), ids=OWN)
def test_its_own_page_and_programs_may_change_things(server: Running, headers: dict[str, str]) -> None:
    assert server.ask("POST", "/v2/logging", b'{"log_info": true}', headers).status == 200
    with server.connect() as raw:
        for _ in range(3):  # also when the head is remembered
            raw.send(infer_request("doubler", rows(1), **headers))
            assert raw.answer().status == 200


def test_a_remembered_head_does_not_let_a_page_in(server: Running) -> None:
    with server.connect() as raw:
        for headers, status in (({}, 200), ({"Origin": EVIL}, 403)) * 3:
            raw.send(infer_request("doubler", rows(1), **headers))
            assert raw.answer().status == status


def test_pages_of_other_origins_may_send_reads_without_seeing_the_answer(server: Running) -> None:
    answer = server.ask("GET", "/v2", headers={"Origin": EVIL, "Sec-Fetch-Site": "cross-site"})
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_of_a_listed_origin_may_change_things() -> None:
    page = {"Origin": "https://app.example.org", "Sec-Fetch-Site": "cross-site"}
    with serving({"doubler": doubler()}, cors_origins=page["Origin"]) as running:
        assert running.ask("POST", "/v2/logging", b"{}", page).status == 200
        assert running.ask("POST", "/v2/logging", b"{}", {**page, "Origin": EVIL}).status == 403


def test_with_keys_the_key_decides(tmp_path: Path) -> None:
    """A page without a key can do nothing; a proxy may give the server another name than the page's."""
    key, shown = make_key("bot", Scope, ("*",), 1_800_000_000, None)
    write_keys(tmp_path / "keys.json", [key])
    page = {"Host": "models.example", "Origin": "https://public.example"}
    with serving({"doubler": doubler()}, keys_file=tmp_path / "keys.json") as running:
        assert running.ask("POST", "/v2/logging", b"{}", page).status == 401
        assert running.ask("POST", "/v2/logging", b"{}", {**page, "Authorization": f"Bearer {shown}"}).status == 200


def test_dns_rebinding_to_loopback_is_refused() -> None:
    with serving({"doubler": doubler()}) as running:
        for host, status in (("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 421)):
            answer = running.ask("GET", "/v2", headers={"Host": host})
            assert answer.status == status
        assert "LATHE_SERVED_HOSTS" in answer.error
        rebound = {"Host": "evil.example", "Origin": EVIL, "Sec-Fetch-Site": "same-origin"}
        assert running.ask("POST", "/v2/logging", b'{"log_info": false}', rebound).status == 421
        with running.connect() as raw:  # no browser; health checks of proxies send no Host
            raw.send(b"GET /v2 HTTP/1.0\r\n\r\n")
            assert raw.answer().status == 200


@pytest.mark.parametrize(
    ("listed", "address", "mode", "names"),
    [
        ("", "127.0.0.1", Mode.OPEN, {"localhost", "127.0.0.1", "[::1]"}),
        ("", "0.0.0.0", Mode.OPEN, set()),
        ("", "127.0.0.1", Mode.KEYED, set()),
        ("A, b", "127.0.0.1", Mode.OPEN, {"a", "b"}),
        ("*", "127.0.0.1", Mode.OPEN, set()),
    ],
)
def test_which_host_names_are_served(listed: str, address: str, mode: Mode, names: set[str]) -> None:
    assert served_names(listed, address, mode) == names
