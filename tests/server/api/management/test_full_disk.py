"""On a nearly full disk the server refuses new data and still manages existing data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from lathe.server.errors import StorageFull
from lathe.server.repository import disk_space
from lathe.server.repository.disk_space import DiskSpace
from lathe.server.settings import Settings
from tests.server.repository.world import toy
from tests.server.server_thread import until
from tests.server.service import Service, service

Fill = Callable[[int], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """A function that sets the number of free bytes."""
    free = [1 << 40]
    monkeypatch.setattr(disk_space.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free[0], f_frsize=1))
    return lambda left: free.__setitem__(0, left)


def upload(running: Service, factor: float = 2.0) -> httpx.Response:
    return httpx.post(f"{running.url}/api/v1/models/m/versions?promote=true", content=toy(factor), timeout=30)


def ready(running: Service) -> httpx.Response:
    return httpx.get(f"{running.url}/v2/health/ready")


def test_a_full_disk_refuses_uploads_and_raises_an_alarm(tmp_path: Path, disk: Fill) -> None:
    least = Settings(model_repo=tmp_path).min_free_disk
    with service(tmp_path / "repo") as running:
        assert upload(running).status_code == 201
        assert "alarms" not in ready(running).json()
        disk(least - 1)
        refused = [upload(running, 3.0), httpx.post(f"{running.url}/api/v1/datasets/d", content=b"a,b\n1,2\n")]
        for answer in refused:
            assert answer.status_code == 507
            assert f"{least - 1} bytes are free on the disk, expected at least {least}" in answer.json()["error"]
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


def test_an_upload_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    free = iter([100, 100, 100, 10])
    full = DiskSpace(tmp_path, 50, "models", lambda _: next(free))
    for _ in range(3):
        full.check()
    with pytest.raises(StorageFull, match="models: 10 bytes are free on the disk, expected at least 50"):
        full.check()


def test_a_missing_folder_is_not_full(tmp_path: Path) -> None:
    missing = DiskSpace(tmp_path / "missing", 50, "models")
    missing.check()
    assert (missing.free, missing.is_full) == (None, False)


def test_free_bytes_are_those_of_the_system(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert disk_space.free_bytes(tmp_path) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.2)


def test_the_log_says_when_the_disk_becomes_full_and_when_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = iter([100, 10, 10, 100])
    watched = DiskSpace(tmp_path, 50, "models", lambda _: next(free))
    caplog.set_level("INFO", "lathe.repository")
    for _ in range(4):
        watched.tell()
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
