"""Requests from pages of other origins (CORS): preflight answers and the headers of each answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pydantic import ValidationError

from lathe.server.settings import Settings
from tests.server.fakes import doubler
from tests.server.running import Answer, Running, infer_request, rows, serving, tensor_of

PAGE, OTHER = "https://app.example.org", "https://evil.example"
INFER = "/v2/models/doubler/infer"


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    origins = f"{PAGE}, http://localhost:3000"
    with serving({"doubler": doubler()}, request.param, cors_origins=origins) as running:
        yield running


def preflight(server: Running, origin: str, path: str = INFER, method: str = "POST") -> Answer:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization,content-type"}
    return server.ask("OPTIONS", path, headers={"Origin": origin, **asked})


@pytest.mark.parametrize("path", [INFER, "/v2", "/v2/repository/index"])
def test_a_page_of_a_listed_origin_may_call(server: Running, path: str) -> None:
    answer = preflight(server, PAGE, path)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_a_page_of_another_origin_may_not_call(server: Running) -> None:
    answer = preflight(server, OTHER)
    assert answer.status == 400
    assert "access-control-allow-origin" not in answer.headers


def test_inference_answers_allow_the_listed_origin(server: Running) -> None:
    with server.connect() as raw:
        for _ in range(4):  # also when the head is remembered
            raw.send(infer_request("doubler", rows(1), Origin=PAGE))
            answer = raw.answer()
            np.testing.assert_array_equal(tensor_of(answer), rows(1) * 2)
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "inference-header-content-length" in answer.headers["access-control-expose-headers"]
        raw.send(infer_request("doubler", rows(1)))
        assert "access-control-allow-origin" not in raw.answer().headers


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 200), ("GET", "/no", 404), ("GET", INFER, 405)])
def test_errors_and_other_answers_allow_the_listed_origin(server: Running, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path, headers={"Origin": PAGE})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, PAGE)
    refused = server.ask(method, path, headers={"Origin": OTHER})
    assert refused.status == status
    assert "access-control-allow-origin" not in refused.headers


def test_a_star_allows_every_origin() -> None:
    with serving({"doubler": doubler()}, cors_origins="*") as running:
        answer = running.ask("GET", "/v2", headers={"Origin": OTHER})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "origin", ["app.example.org", "https://app.example.org/", "https://App.example.org", "https://"]
)
def test_a_setting_that_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="expected \\* or origins such as"):
        Settings(cors_origins=f"{PAGE},{origin}")
