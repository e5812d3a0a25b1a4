"""A disk that is nearly full: nothing new is taken, what is there can be managed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from server.errors import StorageFull
from server.repository import space
from server.repository.space import Space
from server.settings import Settings
from tests.server.api.service import Service, service
from tests.server.repository.world import toy
from tests.server.threaded import until

Fill = Callable[[int], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """Says how many bytes are free from now on."""
    free = [1 << 40]
    monkeypatch.setattr(space.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free[0], f_frsize=1))
    return lambda left: free.__setitem__(0, left)


def upload(running: Service, factor: float = 2.0) -> httpx.Response:
    return httpx.post(f"{running.url}/api/v1/models/m/versions?promote=true", content=toy(factor), timeout=30)


def ready(running: Service) -> httpx.Response:
    return httpx.get(f"{running.url}/v2/health/ready")


def test_a_full_disk_refuses_what_is_new_and_says_so(tmp_path: Path, disk: Fill) -> None:
    least = Settings(model_repo=tmp_path).min_free_disk
    with service(tmp_path / "repo") as running:
        assert upload(running).status_code == 201
        assert "alarms" not in ready(running).json()
        disk(least - 1)
        refused = [upload(running, 3.0), httpx.post(f"{running.url}/api/v1/datasets/d", content=b"a,b\n1,2\n")]
        for answer in refused:
            assert answer.status_code == 507
            assert f"{least - 1} bytes are free on the disk, and at least {least} are kept" in answer.json()["error"]
        assert list((tmp_path / "repo" / "m").glob("2*")) == []
        until(lambda: "alarms" in ready(running).json())
        assert ready(running).status_code == 200
        assert ready(running).json()["alarms"] == [
            "the disk of models is full",
            "the disk of datasets and jobs is full",
        ]
        assert 'lathe_disk_full{folder="models"} 1.0' in httpx.get(f"{running.url}/metrics").text
        disk(least)
        until(lambda: "alarms" not in ready(running).json())
        assert upload(running, 3.0).status_code == 201


def test_an_upload_that_would_fill_the_disk_ends(tmp_path: Path) -> None:
    free = iter([100, 100, 100, 10])
    full = Space(tmp_path, 50, "models", lambda _: next(free))
    for _ in range(3):
        full.check()
    with pytest.raises(StorageFull, match="models: 10 bytes are free on the disk, and at least 50 are kept"):
        full.check()


def test_a_folder_that_is_not_there_is_not_full(tmp_path: Path) -> None:
    missing = Space(tmp_path / "missing", 50, "models")
    missing.check()
    assert (missing.free, missing.is_full) == (None, False)


def test_what_is_free_is_what_the_system_says(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert space.free_bytes(tmp_path) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.2)


def test_the_log_says_when_it_begins_and_when_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = iter([100, 10, 10, 100])
    watched = Space(tmp_path, 50, "models", lambda _: next(free))
    caplog.set_level("INFO", "lathe.repository")
    for _ in range(4):
        watched.tell()
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
