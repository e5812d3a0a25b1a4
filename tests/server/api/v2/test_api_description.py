"""The whole API against its own description: every request that it describes, and many that it does not."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.client import Client
from lathe.server.errors import ServerError, Unprocessable
from tests.server.jobs.world import fake_jobs
from tests.server.repository.world import toy
from tests.server.service import Service, service

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
NOT_SUPPORTED = {"/v2/cudasharedmemory/region/{region}/register"}  # always 501


class NoData:
    """Checks uploaded data without a child process; none of the generated data is valid."""

    async def run(self, task: str, *arguments: str | Path) -> bytes:
        raise Unprocessable("the file is of no known kind")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("described") / "repo"
    with service(root, check=NoData(), make_jobs=fake_jobs) as running, running.client() as client:
        for scale in (1.0, 2.0, 3.0):
            client.upload("m", toy(scale))
        client.submit_job({"steps": 1}, "digits")
        yield running


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_breaks_the_server_or_has_an_undescribed_answer(served: Service) -> None:
    # the rest of the schema does not change
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json").exclude(path_regex="/unload$")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 50
    for operation in operations:
        attempts(operation.as_strategy(), [] if operation.path in NOT_SUPPORTED else [not_a_server_error])()


def attempts(requests: Any, more: list[Any]) -> Callable[[], None]:
    @given(case=requests)
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def test(case: schemathesis.Case) -> None:
        response = case.call_and_validate(checks=[*CHECKS, *more])
        for secret in ("Traceback", "site-packages", "/tmp/", ".lathe"):
            assert secret not in response.text

    return test


# Statuses with which valid requests may be refused: no schema can describe the content of a file, that a digest or a
# length is that of the body, further conditions on a recipe, that steps exclude a weight, or that a key is new. Server
# errors may be right: 501 for unsupported extensions, 503 for a version that is not loaded.
EXPECTED = """
[[operations]]
include-path-regex = "^/api/v1/(datasets/[^/]+|models/[^/]+/versions)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 401, 403, 404, 409, 413, 415, 422]

[[operations]]
include-path-regex = "^/api/v1/models/[^/]+/(canary|rollback|aliases/[^/]+|versions/[^/]+)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 401, 403, 404, 409, 422]

[[operations]]
include-path = "/api/v1/jobs"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 401, 403, 404, 409, 422, 429]

[[operations]]
include-path-regex = "^/v1/"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 401, 403, 404]

[[operations]]
include-path-regex = "^/v2/models/"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 503]
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 401, 403, 404, 503]

[[operations]]
include-path-regex = "sharedmemory/region/[^/]+/register$"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 501]
checks.positive_data_acceptance.expected-statuses = ["2xx", 401, 403, 501]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_finds_nothing_with_any_of_its_checks(tmp_path: Path) -> None:
    """Valid and invalid requests, with a key and without, alone and in sequences that links suggest."""
    key, shown = make_key("all", Scope, ["*"], 0, None)
    write_keys(tmp_path / "keys.json", [key])
    (tmp_path / "schemathesis.toml").write_text(EXPECTED)
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    options = ["--checks=all", "--mode=all", "--max-examples=10", "--seed=1", "--warnings=off"]
    # One worker: Hypothesis calls `ast.parse`, which can fail in two threads at once (CPython issue 106905).
    options += ["--no-color", "--continue-on-failure", "--exclude-path-regex=/unload$"]
    options += ["--header", f"Authorization: Bearer {shown}"]
    serving = service(tmp_path / "repo", check=NoData(), make_jobs=fake_jobs, keys_file=tmp_path / "keys.json")
    with serving as running, Client(running.url, api_key=shown) as client:
        for scale in (1.0, 2.0, 3.0):
            client.upload("m", toy(scale))
        client.submit_job({"steps": 1}, "digits")
        done = subprocess.run(
            [*command, "run", f"{running.url}/openapi.json", *options],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    for phase in ("Examples", "Coverage", "Fuzzing", "Stateful"):
        assert re.search(rf"✅ +{phase}", done.stdout), done.stdout[-3000:]


def test_bounds_use_the_keywords_of_json_schema(served: Service) -> None:
    """`ge` and `lt` are Pydantic's: they get into a description where a validator comes before them."""
    described = httpx.get(f"{served.url}/openapi.json").json()

    def keys(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from value
        for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(below)

    assert not {"ge", "gt", "le", "lt"} & set(keys(described))
    assert described["components"]["schemas"]["AliasMove"]["properties"]["version"]["minimum"] == 1


def test_optional_fields_of_requests_are_not_nullable(served: Service) -> None:
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    operations = [operation for methods in paths.values() for operation in methods.values()]
    parameters = [item for operation in operations for item in operation.get("parameters", ())]
    assert {"Idempotency-Key", "content-digest", "metadata", "state"} <= {item["name"] for item in parameters}
    assert [item for item in parameters if '"null"' in json.dumps(item["schema"])] == []


def test_the_description_is_valid_openapi_3_1(served: Service) -> None:
    """Complete, and without dangling references."""
    described = httpx.get(f"{served.url}/openapi.json").json()
    jsonschema_rs.validator_for({"$ref": "#/components/schemas/InferRequest", "components": described["components"]})
    text = json.dumps(described)
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        found = described
        for part in reference.split("/"):
            found = found[part]
    names = [operation["operationId"] for methods in described["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
    for path, methods in described["paths"].items():
        for operation in methods.values():
            parameters = {item["name"] for item in operation.get("parameters", ()) if item["in"] == "path"}
            assert parameters == set(re.findall(r"{(\w+)}", path)), path


def test_every_status_of_an_error_is_described(served: Service) -> None:
    """Each kind of error has a status of some route, and infer lists all statuses that a call of it can have."""
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    operations = [operation for methods in paths.values() for operation in methods.values()]
    described = {status for operation in operations for status in operation["responses"]}
    kinds: list[type[ServerError]] = [ServerError]
    found: set[str] = set()
    while kinds:
        kind = kinds.pop()
        found.add(str(kind.http_status))
        kinds.extend(kind.__subclasses__())
    assert found <= described
    infer = paths["/v2/models/{model}/infer"]["post"]["responses"]
    statuses = [200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 431, 500, 501, 503, 505, 507]
    assert sorted(map(int, infer)) == statuses


def test_the_example_of_infer_is_a_request(served: Service) -> None:
    described = httpx.get(f"{served.url}/openapi.json").json()
    content = described["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]["application/json"]
    answer = httpx.post(f"{served.url}/v2/models/m/infer", json=content["example"])
    assert answer.status_code == 200, answer.text
    schemas = {"components": described["components"]}
    jsonschema_rs.validator_for({**schemas, **content["schema"]}).validate(content["example"])
    jsonschema_rs.validator_for({**schemas, "$ref": "#/components/schemas/InferResponse"}).validate(answer.json())


@pytest.mark.parametrize(("number", "status"), [("2", 200), ("2.0", 200), ("2e0", 200), ("2.5", 400), ('"2"', 400)])
def test_a_whole_number_is_an_integer_however_it_is_written(served: Service, number: str, status: int) -> None:
    """As in JSON Schema, which describes the routes."""
    body = f'{{"version": {number}}}'
    headers = {"content-type": "application/json"}
    answer = httpx.put(f"{served.url}/api/v1/models/m/aliases/whole", content=body, headers=headers)
    assert answer.status_code == status, answer.text


def test_a_log_level_may_be_written_with_a_zero_fraction(served: Service) -> None:
    answer = httpx.post(f"{served.url}/v2/logging", content=b'{"log_verbose_level": 0.0}')
    assert answer.status_code == 200, answer.text
    assert b'"log_verbose_level":0,' in answer.content


@pytest.mark.parametrize("level", [-1, 1 << 31])
def test_log_levels_outside_of_their_description_are_refused(served: Service, level: int) -> None:
    before = httpx.get(f"{served.url}/v2/logging").json()
    answer = httpx.post(f"{served.url}/v2/logging", json={"log_info": False, "log_verbose_level": level})
    assert (answer.status_code, "log_verbose_level: expected a level" in answer.text) == (400, True)
    assert httpx.get(f"{served.url}/v2/logging").json() == before


@pytest.mark.parametrize(("given", "status"), [("[]", 400), ("0", 400), ('""', 400), ("false", 400), ("null", 200)])
def test_parameters_are_an_object_or_nothing(served: Service, given: str, status: int) -> None:
    body = f'{{"parameters": {given}}}'
    answer = httpx.post(f"{served.url}/v2/repository/models/m/load", content=body)
    assert (answer.status_code, "parameters: expected an object" in answer.text) == (status, status == 400)


def test_an_open_server_describes_no_key(served: Service) -> None:
    described = httpx.get(f"{served.url}/openapi.json").json()
    operations = [operation for methods in described["paths"].values() for operation in methods.values()]
    assert not any("security" in operation for operation in operations)


def test_the_page_of_the_description_needs_no_other_server(served: Service) -> None:
    answer = httpx.get(f"{served.url}/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r"https?:|//\w", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; connect-src 'self'" in policy
    for tag in ("script", "style"):
        inside = answer.text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
