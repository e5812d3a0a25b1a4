"""What all tests of the server share."""

from __future__ import annotations

import pytest

from server.repository import builder
from server.repository.artifacts import compiler_at_start


@pytest.fixture(autouse=True)
def _sources_lie_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever edits the compiler while the tests run does not upgrade their servers."""
    monkeypatch.setattr(builder, "compiler_now", compiler_at_start)
