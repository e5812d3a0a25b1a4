"""Jobs in a hurry: nothing waits for long."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.jobs.dispatch._PAUSES", (0.01, 0.01))
    monkeypatch.setattr("server.jobs.runner._LOOK", 0.02)
    monkeypatch.setattr("server.jobs.runner._SELDOM", 5)
