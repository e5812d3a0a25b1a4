"""`LATHE_TARGET` of a server: its children compile for that machine, and its cache separates machines."""

from __future__ import annotations

import pytest

from lathe.server.processes.child_process import environment
from lathe.server.repository.artifacts import compiler_digest


def test_children_of_the_server_get_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_TARGET", "plain")
    assert environment()["LATHE_TARGET"] == "plain"


def test_the_cache_separates_code_for_different_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for target in ("", "plain", "x86-64-v3"):
        monkeypatch.setenv("LATHE_TARGET", target)
        names.append(compiler_digest())
    assert len(set(names)) == 3
