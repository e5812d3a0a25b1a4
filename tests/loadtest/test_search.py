"""`python -m loadtest search`: promises that can be missed, and a small search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from loadtest.search import LENET, Row, broken_promises, main

LENET_ROW = Row("LeNet-5", (98.0, 97.0), 1000, 100.0)
FOUND = Row("found", (98.5, 97.5), 2000, 99.0)


def test_missed_promises_are_named() -> None:
    assert broken_promises(LENET_ROW, FOUND) == []
    (accuracy,) = broken_promises(LENET_ROW, replace(FOUND, accuracies=(98.0, 96.5)))
    assert accuracy == "accuracy: expected more than that of the LeNet-5, got -0.25 points"
    (time,) = broken_promises(LENET_ROW, replace(FOUND, us=106.0))
    assert time == "time: expected at most 100.0 us, got 106.0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_search_writes_both_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    small = ["--trials", "2", "--rows", "200", "--epochs", "2", "--final-epochs", "2", "--seeds", "1"]
    status = main([*small, "--json", str(file)])
    record = orjson.loads(file.read_bytes())
    lenet, found = record["table"]
    assert lenet["name"] == "LeNet-5" and len(found["accuracies"]) == 1 and found["us"] > 0
    assert record["sweep"]["latency"]["finalists"] and LENET["architecture"] == "lenet5"
    assert status == bool(record["broken"])
    assert "predicted times were off by" in capsys.readouterr().out
