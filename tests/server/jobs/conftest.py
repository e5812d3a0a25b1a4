"""Short waiting times for the tests of jobs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.server.jobs.dispatcher._RETRY_PAUSES", (0.01, 0.01))
    monkeypatch.setattr("lathe.server.jobs.runner._POLL", 0.02)
    monkeypatch.setattr("lathe.server.jobs.runner._DISK_EVERY", 5)
