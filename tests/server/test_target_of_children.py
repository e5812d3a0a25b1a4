"""`LATHE_TARGET` of a server: its children compile for the same machine, and its cache keeps machines apart."""

from __future__ import annotations

import pytest

from server.process import environment
from server.repository.artifacts import compiler_now


def test_children_of_the_server_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_TARGET", "plain")
    assert environment()["LATHE_TARGET"] == "plain"


def test_the_cache_keeps_what_is_compiled_for_different_machines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for target in ("", "plain", "x86-64-v3"):
        monkeypatch.setenv("LATHE_TARGET", target)
        names.append(compiler_now())
    assert len(set(names)) == 3
