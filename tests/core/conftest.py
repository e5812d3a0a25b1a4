"""What holds for all tests of the runtime."""

from __future__ import annotations

from typing import Any

import pytest

from core import compiler
from core.runtime import executable
from core.runtime.given import Sizes


@pytest.fixture(autouse=True)
def _small_runs_use_the_team_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test models are small; without this, a session with several threads would run them on one."""
    monkeypatch.setattr(executable, "_ALONE_BELOW", 0)
    monkeypatch.setattr(executable, "_ALONE_BELOW_IN_A_ROW", 0)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """The bindings of what this process compiles, in order."""
    found: list[Sizes] = []
    original = compiler.build

    def build(graph: Any, options: Any, batching: Any, binding: Sizes, *ahead: Any) -> Any:
        found.append(binding)
        return original(graph, options, batching, binding, *ahead)

    monkeypatch.setattr(compiler, "build", build)
    return found
