"""The comparison of packed with padded runs, on a model small enough for a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from loadtest import packing
from loadtest.__main__ import main


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORDS": 100, "WIDTH": 24, "HEADS": 2, "LAYERS": 1, "LONGEST": 32, "MEAN": 10}.items():
        monkeypatch.setattr(packing, name, value)


@pytest.mark.usefixtures("small")
def test_all_ways_agree_and_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["packing", "--requests", "9", "--rounds", "2", "--json", str(out)]) == 0
    rows = {row["way"]: row for row in orjson.loads(out.read_bytes())}
    assert len(rows) == 6 and rows[packing.PACKED]["ahead"] == 1.0
    assert all(row["ms"] > 0 for row in rows.values())


def test_what_differs_is_no_figure() -> None:
    right, wrong = np.ones((2, 3), np.float32), np.full((2, 3), 1.01, np.float32)
    with pytest.raises(ValueError, match=r"packed: differs from ONNX Runtime by 1\.0e-02"):
        packing.measure({packing.PACKED: lambda: wrong, "ONNX Runtime one by one": lambda: right}, 1)


def test_lengths_are_as_said() -> None:
    lengths = [feed["input_ids"].shape[1] for feed in packing.requests(4000)]
    assert min(lengths) >= 1 and max(lengths) == packing.LONGEST
    assert abs(np.mean(lengths) - packing.MEAN) < 2
