"""Fixtures for the tests of batching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lathe.server.batching.batcher import Batcher
from tests.server.batching.mode_check import CheckedMode


@pytest.fixture(autouse=True)
def checked_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckedMode]:
    """Fail a test in which a batcher enters a mode that may not follow its present one."""
    checked = CheckedMode()
    monkeypatch.setattr(Batcher, "mode", checked, raising=False)
    yield checked
    assert checked.violations == []
