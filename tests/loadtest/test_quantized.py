"""`python -m loadtest quantized`: each quantizer's model runs, agrees with its float32 model, and gets a time."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from loadtest import quantized, zoo


@pytest.mark.slow
def test_a_small_network(tmp_path: Path) -> None:
    path, table = tmp_path / "lenet.onnx", tmp_path / "table.json"
    path.write_bytes(zoo.model("lenet").SerializeToString())
    options = ["--batches", "1,3", "--rounds", "1", "--slice", "0.01", "--json", str(table)]
    assert quantized.main([str(path), *options]) == 0
    rows = orjson.loads(table.read_bytes())
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["int8_ms"].keys() == row["error"].keys() == {"lathe", "ort static", "ort dynamic"}
        assert row["float32_ms"].keys() == {"lathe", "ort"}
        assert 0 < row["error"]["lathe"] < 0.1
        assert row["ahead"] > 0


def test_limits() -> None:
    def row(name: str, ahead: float) -> quantized.Row:
        return quantized.Row(name, 1, 1, {"lathe": 2.0}, {"lathe": 1.0}, {}, ahead)

    assert quantized.missed([row("a", 1.2), row("b", 1.2)]) == []
    assert quantized.missed([row("a", 2.0), row("b", 0.9)]) == ["b, batch 1: 0.90, expected 0.95"]
    assert quantized.missed([row("a", 1.0)]) == ["geometric mean 1.00, expected 1.1"]
