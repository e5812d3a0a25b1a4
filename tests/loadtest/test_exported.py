"""The comparison with ONNX Runtime on a folder of models."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

from loadtest.clock import CLOCKS, call_ms
from loadtest.exported import Figures, First, Settings, Steady, main, measure, measure_in_child, shape_of, summary
from loadtest.onnx_runtime_peer import largest_error

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
doubled (float[batch, length] x) => (float[batch, length] y) { y = Add(x, x) }
"""
SHORT = Settings(rounds=1, seconds=0.01, tune="off")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model with feeds of three shapes, and two other models for first runs."""
    at = tmp_path / "doubled"
    at.mkdir()
    onnx.save(parse_model(MODEL), str(at / "model.onnx"))
    for index, shape in enumerate([(1, 3), (3, 4), (8, 5)]):
        np.savez(at / f"feeds-{index}.npz", x=np.ones(shape, np.float32))
    for index, shape in enumerate([(1, 7), (1, 9)]):
        np.savez(at / f"lengths-{index}.npz", x=np.ones(shape, np.float32))
    return tmp_path


@pytest.mark.slow
def test_steady_runs_of_batches_1_and_8_and_first_runs_of_other_lengths(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rounds", "1", "--slice", "0.01", "--tune", "off", "--json", str(folder / "rows.json")]
    assert main([str(folder), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [["doubled", "batch", "1"], ["doubled", "batch", "8"]]
    assert [line.split()[:2] for line in lines[2:4]] == [["doubled", "1x7"], ["doubled", "1x9"]]
    assert "geometric mean of 2 cases" in lines[4]
    assert "of 2 take more than x2" in lines[5]
    kept = json.loads((folder / "rows.json").read_text())
    assert [row["feeds"] for row in kept["steady"]] == ["feeds-0", "feeds-2"]
    assert [row["feeds"] for row in kept["first"]] == ["lengths-0", "lengths-1"]


def test_each_kind_of_figure_alone(folder: Path) -> None:
    steady = measure(folder / "doubled", Settings("steady", (3,), 1, 0.01, "processor", "off"))
    assert [row.batch for row in steady.steady] == [3]
    assert not steady.first
    first = measure(folder / "doubled", Settings("first", rounds=1, clock="processor", tune="off"))
    assert not first.steady
    assert all(row.ours_ms > 0 and row.error == 0 for row in first.first)


def test_without_other_lengths_the_later_feeds_are_first_runs(folder: Path) -> None:
    for file in (folder / "doubled").glob("lengths-*.npz"):
        file.unlink()
    found = measure(folder / "doubled", Settings("first", tune="off"))
    assert [row.feeds for row in found.first] == ["feeds-1", "feeds-2"]


@pytest.mark.slow
def test_all_batches_run_by_default(folder: Path) -> None:
    found = measure(folder / "doubled", Settings("steady", (2,), 1, 0.01, tune="off"))
    assert [row.batch for row in found.steady] == [1, 3, 8]


def test_an_unreadable_model_is_one_line(folder: Path) -> None:
    (folder / "doubled" / "model.onnx").write_bytes(b"no model")
    assert isinstance(measure_in_child(folder / "doubled", SHORT), str)


def test_short_calls_are_timed_in_thousands() -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    assert call_ms(count, 0, CLOCKS["wall"]) < 0.05
    assert calls == 1005
    assert call_ms(lambda: time.sleep(0.002), 0, CLOCKS["wall"]) >= 2


def test_processor_time_excludes_waiting() -> None:
    assert call_ms(lambda: time.sleep(0.002), 0, CLOCKS["processor"]) < 2


def test_the_summary_covers_batches_1_and_8() -> None:
    steady = [Steady("a", "", batch, 1.0, 1.0, ahead, 0, 0.0) for batch, ahead in ((1, 2.0), (3, 9.0), (8, 0.5))]
    first = [First("a", "", "", ours, 1.0, 0.0, 0.0) for ours in (1.0, 1.5, 3.0)]
    assert summary(Figures(steady, first)) == [
        "ahead by x1.00 in the geometric mean of 2 cases, worst x0.50, 1 below x0.95",
        "first runs take x1.50 of ONNX Runtime's time in the median, at most x3.00; 1 of 3 take more than x2",
    ]
    assert summary(Figures()) == ["nothing to compare"]


def test_ratios_beyond_their_limits_are_counted() -> None:
    steady = [Steady("a", "", batch, 1.0, 1.0, ahead, 0, 0.0) for batch, ahead in ((1, 0.94), (3, 0.1), (8, 0.96))]
    first = [First("a", "", "", ours, 1.0, 0.0, 0.0) for ours in (1.9, 2.1, 3.0)]
    assert Figures(steady, first).missed == 3


def test_a_model_without_figures_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "doubled" / "model.onnx").write_bytes(b"no model")
    assert main([str(folder), "--rounds", "1"]) == 1
    assert "1 models have no figures" in capsys.readouterr().out


def test_a_result_that_differs_is_reported() -> None:
    rows = Figures([Steady("a", "", 1, 1.0, 1.0, 1.0, 0, 0.5)])
    assert "DIFFERS by 5e-01" in rows.lines()[0]
    assert summary(rows)[-1] == "1 results differ"


def test_the_distance_between_results() -> None:
    other = np.array([1.0, np.inf, -4.0], np.float32)
    assert largest_error({"y": other}, [other]) == 0
    assert largest_error({"y": other + np.float32([0, 0, 1])}, [other]) == 0.25
    assert largest_error({"y": -other}, [other]) == np.inf, "infinite on the other side"
    assert largest_error({"y": other.astype(np.float64)}, [other]) == np.inf
    assert largest_error({"y": other[:2]}, [other]) == np.inf
    assert largest_error({"y": [{1: 0.5}]}, [[{1: 0.5}]]) == 0
    assert largest_error({"y": [{1: 0.5}]}, [[{2: 0.5}]]) == np.inf


def test_the_shape_of_the_largest_input_is_shown() -> None:
    assert shape_of({"mask": np.ones((1, 4)), "past": np.ones((1, 2, 3, 4))}) == "1x2x3x4"
