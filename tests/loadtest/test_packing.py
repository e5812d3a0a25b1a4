"""The comparison of packed with padded runs, on a small model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest

from loadtest import packing
from loadtest.__main__ import main
from loadtest.model_builder import Feeds


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORDS": 100, "WIDTH": 24, "HEADS": 2, "LAYERS": 1, "LONGEST": 32, "MEAN": 10}.items():
        monkeypatch.setattr(packing, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("small_model")
def test_all_methods_agree_and_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["packing", "--requests", "9", "--rounds", "2", "--json", str(out)]) == 0
    report = orjson.loads(out.read_bytes())
    rows = {row["way"]: row for row in report["ways"]}
    assert len(rows) == 6 and rows[packing.PACKED]["ahead"] == 1.0
    assert all(row["ms"] > 0 for row in rows.values())
    assert report["latencies"][0]["way"] == packing.PACKED
    assert all(0 < wait["p50"] <= wait["p99"] for wait in report["latencies"])


@pytest.mark.usefixtures("small_model")
def test_a_model_gets_only_the_inputs_that_it_has(tmp_path: Path) -> None:
    model = packing.minilm()
    taken = [value for value in model.graph.input if value.name != "token_type_ids"]
    del model.graph.input[:]
    model.graph.input.extend(taken)
    read = packing.read_by(model.SerializeToString(), packing.requests(2))
    assert [list(feed) for feed in read] == [["input_ids", "attention_mask"]] * 2


def test_requests_that_have_arrived_run_together() -> None:
    groups: list[int] = []

    def run(group: Sequence[Feeds]) -> None:
        groups.append(len(group))
        time.sleep(0.2)

    arrivals = np.array([0.0, 0.1, 0.1, 0.1, 0.8])
    times = packing.open_loop(run, [{}] * 5, arrivals, 3)
    assert groups == [1, 3, 1]
    assert times.min() >= 0.2 and times[1] >= 0.3


def test_wrong_results_get_no_figure() -> None:
    right, wrong = np.ones((2, 3), np.float32), np.full((2, 3), 1.01, np.float32)
    with pytest.raises(ValueError, match=r"packed: differs from ONNX Runtime by 1\.0e-02"):
        packing.measure({packing.PACKED: lambda: wrong, "ONNX Runtime one by one": lambda: right}, 1)


def test_request_lengths_match_the_description() -> None:
    lengths = [feed["input_ids"].shape[1] for feed in packing.requests(4000)]
    assert min(lengths) >= 1 and max(lengths) == packing.LONGEST
    assert abs(np.mean(lengths) - packing.MEAN) < 2


@pytest.mark.parametrize(
    ("ahead", "packed_p99", "missed"), [(1.6, 9.0, False), (1.4, 9.0, True), (1.6, 11.0, True), (1.6, 10.0, True)]
)
def test_limits_decide_what_is_missed(ahead: float, packed_p99: float, missed: bool) -> None:
    rows = [packing.Row(packing.PACKED, 1.0, 1.0), packing.Row("ONNX Runtime padded", ahead, ahead)]
    waits = [packing.Latency(packing.PACKED, 1.0, packed_p99), packing.Latency("ONNX Runtime padded", 1.0, 10.0)]
    assert packing.misses(rows, waits) is missed
