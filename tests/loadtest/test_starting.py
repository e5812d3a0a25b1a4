"""The duration of a start: a whole server is started, killed and started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import starting
from loadtest.__main__ import main


@pytest.mark.slow
def test_a_server_starts_cold_and_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(starting, "COLD", 1e6)  # the machine that runs tests is busy
    monkeypatch.setattr(starting, "AGAIN", 1e6)
    assert main(["starting", "--models", "2", "--json", str(tmp_path / "out.json")]) == 0
    cold, again = json.loads((tmp_path / "out.json").read_text())
    assert [cold["name"], again["name"]] == ["cold", "again"]
    assert 0 < again["processor"] < cold["processor"]  # the second start compiles nothing
    assert all(0 < start["corrected"] <= start["clock"] for start in (cold, again))
    assert "again: ready after" in capsys.readouterr().out


def test_a_start_that_takes_too_long_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = starting.Start("cold", 40.0, 31.0, 20.0, 30.0)
    monkeypatch.setattr(starting, "measure", lambda count: [slow])
    assert main(["starting"]) == 1


def test_models_differ(tmp_path: Path) -> None:
    starting.write_models(tmp_path, 20)
    assert len({file.read_bytes() for file in tmp_path.glob("*/1/model.onnx")}) == 20
