"""JSON answers end with a newline, and their length includes it; inference answers are unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from lathe.server.access.scopes import ROUTES
from tests.server.repository.world import toy
from tests.server.route_parameters import PARAMETERS
from tests.server.service import Service, service

# Paths with their parameters filled in. A parameter without a value fails when tests are collected: in every selection.
REQUESTS = sorted(
    (method, template.format(**PARAMETERS | {"alias": "live"}))
    for method, template in ROUTES
    if not template.endswith("/infer")
)
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("newline") / "repo") as found:
        answer = httpx.post(f"{found.url}/api/v1/models/m/versions?promote=true", content=toy(2.0))
        assert answer.status_code == 201 and answer.text.endswith("}\n")
        yield found


@pytest.mark.sample(3)
@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_every_json_answer_ends_with_a_newline(running: Service, method: str, path: str) -> None:
    url = running.url + path
    with httpx.Client() as client:  # one connection: a wrong length would break the second request
        for _ in range(2):
            answer = client.request(method, url)
            if answer.headers.get("content-type") == "application/json":
                assert answer.content.endswith(b"\n") and not answer.content.endswith(b"\n\n")
                assert int(answer.headers["content-length"]) == len(answer.content)
                answer.json()
        if method == "GET":
            assert client.head(url).content == b""


@pytest.mark.parametrize("path", ["/nowhere", "/v2/models/none", "/api/v1/models/none"])
def test_errors_end_with_a_newline(running: Service, path: str) -> None:
    answer = httpx.get(running.url + path)
    assert answer.status_code == 404 and answer.content.endswith(b"}\n")


def test_inference_answers_have_no_newline(running: Service) -> None:
    assert httpx.post(f"{running.url}/v2/models/m/infer", json=BODY).content.endswith(b"}")
