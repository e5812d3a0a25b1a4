"""The metrics in a job's record: of large confusion matrices, and of metrics that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lathe.server.errors import Internal
from lathe.server.jobs.evaluator import read_metrics_document
from lathe.server.jobs.gate import Gate, evaluate_gate
from lathe.server.jobs.result_metrics import metrics_for_record


def write(folder: Path, document: Any) -> Path:
    """Write a document as a training does; returns the file."""
    (folder / "result").mkdir()
    file = folder / "result" / "metrics.json"
    file.write_text(json.dumps(document, indent=1))
    return file


def test_a_record_has_the_confusion_matrix_of_250_classes(tmp_path: Path) -> None:
    document = {"metrics": {"accuracy": 0.9}, "confusion": [[0] * 250] * 250}
    assert metrics_for_record(write(tmp_path, document)) == document


def test_a_record_leaves_out_a_large_confusion_matrix_and_says_so(tmp_path: Path) -> None:
    document = {"metrics": {"accuracy": 0.9}, "rows": 5, "confusion": [[0] * 500] * 500}
    expected = {"metrics": {"accuracy": 0.9}, "rows": 5, "left_out": ["confusion"]}
    assert metrics_for_record(write(tmp_path, document)) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_fails_the_gate(value: float, tmp_path: Path) -> None:
    file = write(tmp_path, {"metrics": {"accuracy": 0.5, "log_loss": value}})
    assert metrics_for_record(file) == {"metrics": {"accuracy": 0.5, "log_loss": None}}
    decision = evaluate_gate(Gate(max={"log_loss": 1.0}), read_metrics_document(tmp_path)["metrics"], None)
    assert (decision.passed, decision.reason) == (False, "log_loss was not measured")


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_an_invalid_file_gives_an_empty_record(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, {})
    file.write_text(text)
    assert metrics_for_record(file) == {}
    with pytest.raises(Internal):
        read_metrics_document(tmp_path)
