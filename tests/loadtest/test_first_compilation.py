"""The cost of a model's first compilation: the measured figures, and which figures break a promise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.__main__ import main
from loadtest.cold import MB, Cold
from tests.loadtest.decoder import write_decoder

GOOD = Cold("m", 10, 100 * MB, 4.0, None, 90 * MB, 200 * MB, 280 * MB)


def test_more_memory_or_time_than_allowed_is_named() -> None:
    assert GOOD.broken(None) == GOOD.broken(4.5) == []
    assert GOOD.broken(3.5) == ["m takes 4.0 s, expected at most 3.5"]
    assert replace(GOOD, peak=281 * MB).broken(None) == ["m takes 281 MB, expected at most 280"]


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_one_command_measures_with_feeds_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: bool
) -> None:
    path = write_decoder(tmp_path / "model.onnx")
    for index, past in enumerate((0, 3) if beside else ()):
        feeds = {"input_ids": np.ones((1, 2), np.int64), "past_keys": np.ones((1, 1, past, 4), np.float32)}
        np.savez(tmp_path / f"feeds-{index}.npz", **feeds)
    main(["cold", str(path), "--json", str(tmp_path / "out.json")])
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["nodes"] == 8
    assert row["weights"] >= 4 * (50 * 4 + 4 * 30)
    assert row["first"] > 0
    assert (row["next"] is not None) is beside
    assert row["imports"] < row["resident"] <= row["peak"]
    assert tmp_path.name in capsys.readouterr().out
    assert main(["cold", str(path), "--seconds", "0.001"]) == 1
