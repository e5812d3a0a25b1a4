"""Fixtures of all tests of the core."""

from __future__ import annotations

from typing import Any

import pytest

from lathe.core.compiler import pipeline
from lathe.core.runtime.host import executable
from lathe.core.runtime.session.run_inputs import CodeBinding


@pytest.fixture(autouse=True)
def _small_runs_use_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test models are small; without this, a session with several threads would run them on one."""
    monkeypatch.setattr(executable, "_ONE_THREAD_BELOW", 0)
    monkeypatch.setattr(executable, "_ONE_THREAD_BELOW_WHEN_AWAKE", 0)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[CodeBinding]:
    """The bindings of the code that this process compiles, in order."""
    found: list[CodeBinding] = []
    original = pipeline.build

    def build(graph: Any, options: Any, batching: Any, binding: CodeBinding, *ahead: Any) -> Any:
        found.append(binding)
        return original(graph, options, batching, binding, *ahead)

    monkeypatch.setattr(pipeline, "build", build)
    return found
