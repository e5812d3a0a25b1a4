"""What holds for all tests of the runtime."""

from __future__ import annotations

import pytest

from core.runtime import executable


@pytest.fixture(autouse=True)
def _small_runs_use_the_team_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test models are small; without this, a session with several threads would run them on one."""
    monkeypatch.setattr(executable, "_ALONE_BELOW", 0)
    monkeypatch.setattr(executable, "_ALONE_BELOW_IN_A_ROW", 0)
