"""The server that tests of the example pipelines share, one for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.pipelines.example_server import Running, example_server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with example_server(tmp_path_factory.mktemp("pipelines") / "repo") as server:
        yield server
