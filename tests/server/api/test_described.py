"""The management API against its own description: every request it describes, and many that it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

from server.errors import Unprocessable
from tests.server.api.service import Service, service
from tests.server.jobs.world import fake_jobs
from tests.server.repository.world import toy

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class NoData:
    """Looks at uploaded data without a process for each; none of what is made up here is any."""

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
def test_no_request_breaks_it_or_is_told_what_is_not_described(served: Service) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json").include(path_regex="^/api/v1")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:
        attempts(operation.as_strategy())()


def attempts(requests: Any) -> Callable[[], None]:
    @given(case=requests)
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def test(case: schemathesis.Case) -> None:
        response = case.call_and_validate(checks=CHECKS)
        for secret in ("Traceback", "site-packages", "/tmp/", ".lathe"):
            assert secret not in response.text

    return test
