"""The comparison with ONNX Runtime on models of a folder."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

from loadtest.exported import Row, call_ms, main, measured, summary

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
doubled (float[batch, length] x) => (float[batch, length] y) { y = Add(x, x) }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model with feeds of two shapes."""
    at = tmp_path / "doubled"
    at.mkdir()
    onnx.save(parse_model(MODEL), str(at / "model.onnx"))
    for index, shape in enumerate([(1, 3), (8, 5)]):
        np.savez(at / f"feeds-{index}.npz", x=np.ones(shape, np.float32))
    return tmp_path


def test_a_row_for_each_shape_and_first_runs_after_the_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--rounds", "1", "--slice", "0.01", "--json", str(folder / "rows.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [["doubled", "batch", "1"], ["doubled", "batch", "8"]]
    assert "first" not in lines[0]
    assert "first x" in lines[1]
    assert "geometric mean of 2 cases" in lines[2]


def test_a_model_that_cannot_be_read_is_one_line(folder: Path) -> None:
    (folder / "doubled" / "model.onnx").write_bytes(b"no model")
    assert isinstance(measured(folder / "doubled", 1, 0.01), str)


def test_short_calls_are_timed_by_the_thousand() -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    assert call_ms(count, 0) < 0.05
    assert calls == 1001
    assert call_ms(lambda: time.sleep(0.002), 0) >= 2


def test_the_summary_is_of_batches_1_and_8() -> None:
    rows = [
        Row("a", 1, 1.0, 2.0, 2.0, None, 0),
        Row("a", 3, 1.0, 9.0, 9.0, 3.0, 0),
        Row("a", 8, 2.0, 1.0, 0.5, 1.0, 0),
    ]
    told = summary(rows)
    assert "x1.00 in the geometric mean of 2 cases, worst x0.50, 1 below x0.95; 1 of 2 first runs" in told
    assert summary([]) == "nothing to compare"
