"""The memory budget over HTTP: a model that does not fit is refused with the numbers, and loaded models serve on."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from lathe.server.client import ApiError, Client
from lathe.server.settings import MIB
from tests.server.repository.world import toy
from tests.server.service import service

ROW = np.ones((1, 4), np.float32)
FIRST, SECOND = toy(2.0, weights=60 * MIB, run=5 * MIB), toy(3.0, weights=50 * MIB)


def answer(client: Client, model: str) -> float:
    return float(client.infer(model, {"x": ROW}).outputs["y"][0, 0])


def test_a_model_that_does_not_fit_is_refused_and_loads_once_it_fits(tmp_path: Path) -> None:
    with (
        service(tmp_path / "repo", max_memory=100 * MIB, queue_bytes=1 * MIB) as running,
        running.client() as client,
        httpx.Client(base_url=running.url) as raw,
    ):
        client.upload("first", FIRST)
        refused = raw.post("/api/v1/models/second/versions", content=SECOND)
        assert (refused.status_code, refused.json()["code"]) == (507, "out_of_memory")
        assert "51 MiB of memory (weights 50 MiB, queue 1 MiB)" in refused.json()["error"]
        assert "of the 100 MiB for all models 66 MiB are claimed" in refused.json()["error"]
        assert raw.get("/v2/models/second").status_code == 404
        assert answer(client, "first") == 2.0
        assert float(client.metrics().split("\nlathe_memory_claimed_bytes ")[1].split("\n")[0]) == 66 * MIB

        with pytest.raises(ApiError, match=r"61 MiB of memory"):
            client.upload("first", toy(4.0, weights=60 * MIB), promote=True)
        assert answer(client, "first") == 2.0

        assert raw.post("/v2/repository/models/first/unload").status_code == 200
        client.upload("second", SECOND)
        assert answer(client, "second") == 3.0
        refused = raw.post("/v2/repository/models/first/load")
        assert refused.status_code == 507
        assert "66 MiB of memory" in refused.json()["error"]
        assert answer(client, "second") == 3.0

        assert raw.post("/v2/repository/models/second/unload").status_code == 200
        assert raw.post("/v2/repository/models/first/load").status_code == 200
        assert answer(client, "first") == 2.0
