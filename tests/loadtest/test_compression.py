"""`python -m loadtest compression`: folds that cover all rows once, paired differences, and a small table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadtest.compression import digits, folds, main
from loadtest.compression_results import Results, Score, markdown, rows_of


def test_folds_cover_all_rows_once_with_equal_shares_of_classes() -> None:
    _, y = digits()
    parts = folds(y, 5, seed=1)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    counts = np.array([np.bincount(y[part], minlength=10) for part in parts])
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    assert not np.array_equal(parts[0], folds(y, 5, seed=2)[0])


def test_differences_are_paired() -> None:
    by_seed = [{"float32": 0.9, "small": 0.89}, {"float32": 0.8, "small": 0.79}, {"float32": 0.7, "small": 0.69}]
    exact, small = rows_of(by_seed, {"float32": 4, "small": 1}, {"float32": 2e-3, "small": 1e-3})
    assert (exact.difference, exact.error, exact.size, exact.us) == (0.0, 0.0, 4, 2000.0)
    assert small.accuracy == pytest.approx(79.0)
    assert small.difference == pytest.approx(-1.0)
    assert small.error == pytest.approx(0.0, abs=1e-9)
    assert markdown([exact, small]).splitlines()[-1] == "| small | 79.00 % | -1.00 ± 0.00 | 1 | 0.25 | 1000 | 2.00 |"


def test_results_are_read_again(tmp_path: Path) -> None:
    first = Results(tmp_path)
    first.add(Score("float32", 0, 0, 9, 10), b"exact")
    first.add(Score("float32", 0, 1, 7, 10), b"exact again")
    assert first.model("m", lambda: b"trained") == b"trained"
    again = Results(tmp_path)
    assert again.has("float32", 0, 1)
    assert not again.has("float32", 1, 0)
    assert not again.has("small", 0, 0)
    assert again.file("float32") == b"exact again"
    assert again.by_seed(["float32"], [0]) == [{"float32": 0.8}]
    assert again.model("m", lambda: pytest.fail("it is trained already")) == b"trained"


@pytest.mark.slow
def test_a_short_run_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "--only=int8: static: percentile,int8: dynamic,ternary weights,half of the channels,ONNX Runtime: static"
    given = [
        "--seeds",
        "1",
        "--folds",
        "2",
        "--epochs",
        "4",
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "t.json"),
        chosen,
    ]
    assert main(given) == 0
    table = {row["method"]: row for row in json.loads((tmp_path / "t.json").read_bytes())["table"]}
    assert table["float32"]["accuracy"] > 60
    assert table["int8: dynamic"]["size"] < 0.4 * table["float32"]["size"]
    assert table["half of the channels, trained"]["size"] < 0.4 * table["float32"]["size"]
    assert "half of the channels, trained" in capsys.readouterr().out
