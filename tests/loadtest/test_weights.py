"""`python -m loadtest weights`: small products; results that are near, and limits that can be missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from loadtest.weights import Row, broken_limits, compare, main


@pytest.mark.slow
def test_all_kinds_compute_nearly_the_same_product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    assert main(["--depth", "256", "--columns", "256", "--rows", "1,4", "--rounds", "1", "--json", str(file)]) == 0
    table = orjson.loads(file.read_bytes())
    assert len(table) == 2 * 9
    for row in table:
        assert row["us"] > 0
        least, most = (0, 1e-5) if row["kind"] == "float32" else (1e-3, 0.03) if row["kind"][0] == "8" else (0.01, 0.2)
        assert least <= row["error"] <= most, row
    assert "GB/s of weights" in capsys.readouterr().out


def test_missed_limits_are_named() -> None:
    table = [*compare(256, 256, [1, 4], rounds=1), Row(1, "read", 10.0, 10**6, 0.0)]
    slow = [row if row.kind in ("float32", "read") else replace(row, us=1e6) for row in table]
    fast = [row if row.kind in ("float32", "read") else replace(row, us=1e-6) for row in table]
    assert broken_limits(fast) == []
    missed = broken_limits(slow)
    assert len(missed) == 2 * 6
    assert any("GB/s" in line for line in missed) and any("4 rows" in line for line in missed)
