"""The table of exported models, from verdicts and figures made by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtest.exported import Figures, First, Steady
from tests.exporters import table
from tests.exporters.evaluation import Evaluation

VERDICTS = [
    Evaluation("bert.dynamo", batchable=True, independent=True, packable=True),
    Evaluation("bert.torchscript", batchable=False, independent=True, fallbacks=["NonZero"]),
    Evaluation("old.dynamo", result="ORT no"),
    Evaluation("wrong.dynamo", result="differs"),
]
STEADY = [Steady("bert.dynamo", "feeds-0", batch, 1.0, 2.0, ahead, 0, 0.0) for batch, ahead in ((1, 2.0), (8, 0.5))]
FIRST = [First("bert.dynamo", "lengths-0", "1x7", ours, 1.0, 0.0, 0.0) for ours in (1.0, 1.5, 3.0)]


def test_each_model_has_a_row_and_the_summary_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "models.md"
    page.write_text("before\n<!-- exported -->\nold\n<!-- /exported -->\nafter\n")
    monkeypatch.setattr(table, "PAGE", page)
    (tmp_path / "verdicts").write_text("".join(json.dumps(asdict(each)) + "\n" for each in VERDICTS))
    (tmp_path / "figures").write_text(json.dumps(asdict(Figures(STEADY, FIRST))))
    table.main([str(tmp_path / "verdicts"), str(tmp_path / "figures"), "--machine", "A kind of CPU."])
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines and "A kind of CPU." in lines
    assert "| bert.dynamo | packed |  | 2.00 | 0.50 | 1.50, 3.00 |" in lines
    assert "| bert.torchscript | alone | 1 |  |  |  |" in lines
    assert "| old.dynamo | ONNX Runtime refuses it |  |  |  |  |" in lines
    assert "| wrong.dynamo | differs |  |  |  |  |" in lines
    figures = dict(line.strip("| ").rsplit(" | ", 1) for line in lines if line.startswith("|"))
    assert figures["exported models, architectures"] == "4, 3"
    assert figures["agree with ONNX Runtime"] == "2 of 3"
    assert figures["rows are independent in ONNX Runtime, and batched here"] == "1 of 2"
    assert figures["every node has a kernel"] == "2 of 3"
    assert figures["ONNX Runtime's time by Lathe's, geometric mean"] == "1.00"
    assert figures["of 2 cases below 0.95; the lowest"] == "1; 0.50"
    assert figures["of 3 first runs above 2"] == "1"
