"""The output of commands that do not write to a terminal."""

from __future__ import annotations

import io

import pytest

from lathe.server.cli.terminal import Output


@pytest.mark.parametrize(("columns", "lines"), [(None, 1), ("80", 5)])
def test_lines_in_a_pipe_are_not_wrapped(columns: str | None, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    pipe = io.StringIO()
    Output(file=pipe).print("a digest " * 40)
    assert len(pipe.getvalue().splitlines()) == lines
