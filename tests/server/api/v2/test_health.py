"""The bodies of health answers, which other clients read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.repository.world import copy_by_hand, toy
from tests.server.server_thread import until
from tests.server.service import service

BAD = b"\x08nonsense"


def health(url: str, of: str) -> tuple[int, Any]:
    response = httpx.get(f"{url}/v2/health/{of}")
    assert response.headers["content-type"] == "application/json"
    return response.status_code, response.json()


def test_the_body_of_a_ready_server(tmp_path: Path) -> None:
    copy_by_hand(tmp_path, 1, toy())
    with service(tmp_path) as running:
        assert health(running.url, "live") == (200, {"live": True})
        assert health(running.url, "ready") == (200, {"ready": True})


def test_the_body_of_a_starting_server_names_what_it_waits_for(tmp_path: Path) -> None:
    copy_by_hand(tmp_path, 1, toy())
    with service(tmp_path, held=True) as running:
        until(lambda: health(running.url, "ready")[1]["waiting"])
        waiting = [{"name": "m", "version": "1", "state": "compiling"}]
        until(lambda: health(running.url, "ready")[1]["waiting"] == waiting)
        assert health(running.url, "ready") == (
            503, {"ready": False, "reason": "the server is starting", "waiting": waiting},
        )  # fmt: skip
        assert health(running.url, "live") == (200, {"live": True})
        running.stages.gate.set()
        until(lambda: health(running.url, "ready") == (200, {"ready": True}))


@pytest.mark.parametrize("strict", [True, False])
def test_the_body_of_a_server_with_a_model_that_cannot_be_loaded(strict: bool, tmp_path: Path) -> None:
    copy_by_hand(tmp_path, 1, BAD)
    with service(tmp_path, held=True, strict_readiness=strict) as running:
        running.stages.gate.set()
        waiting = [{"name": "m", "version": "1", "state": "failed"}]
        reason = "live versions are not in memory"
        expected = (503, {"ready": False, "reason": reason, "waiting": waiting}) if strict else (200, {"ready": True})
        until(lambda: health(running.url, "ready") == expected)
