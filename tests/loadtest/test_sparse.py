"""`python -m loadtest sparse`: small products; limits that can be missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from loadtest.sparse import broken_limits, compare, main


@pytest.mark.slow
def test_products_and_convolutions_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    arguments = ["--products", "128x96,8x8x64x96", "--zeros", "0.9", "--batches", "2", "--rounds", "1"]
    assert main([*arguments, "--json", str(file)]) == 0
    table = orjson.loads(file.read_bytes())
    assert [row["product"] for row in table] == ["128x96", "8x8x64x96"]
    assert all(row["dense_us"] > 0 and row["sparse_us"] > 0 for row in table)
    assert "times as fast" in capsys.readouterr().out


def test_missed_limits_are_named() -> None:
    (row,) = compare(["128x96"], [0.9], [2], rounds=1)
    assert broken_limits([replace(row, sparse_us=row.dense_us / 3)]) == []
    assert "128x96" in broken_limits([replace(row, sparse_us=row.dense_us)])[0]
