"""A short run against real servers that are killed: the history is complete and valid, and violations are seen."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from loadtest.__main__ import main
from loadtest.chaos.clients import MODELS, model_file
from loadtest.chaos.history import read_history, write_history
from loadtest.chaos.run import HISTORY, describe_starts


def test_each_model_multiplies_by_its_factor() -> None:
    first, second = model_file(3), model_file(4)
    assert first != second
    (constant,) = onnx.load_from_string(first).graph.initializer
    assert onnx.numpy_helper.to_array(constant) == 3.0


def test_a_run_without_starts_has_an_empty_description() -> None:
    assert list(describe_starts([], [])) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_server_keeps_what_it_acknowledged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["chaos", "--seconds", "20", "--every", "8", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "nothing acknowledged is lost: 0 violations" in said
    history = read_history(tmp_path / HISTORY)
    kinds = Counter(operation.kind for operation in history)
    assert kinds["start"] >= 3
    assert kinds["audit"] >= 2 * len(MODELS)
    assert kinds["move"] > 10 and kinds["infer"] > 10

    moved = random.Random(1).choice([op for op in history if op.kind == "aliases" and op.found.get("live")])
    history[history.index(moved)] = replace(moved, found={**moved.found, "live": 10**6})
    write_history(tmp_path / "broken.jsonl", history)
    assert main(["chaos", "--check", str(tmp_path / "broken.jsonl")]) == 1
    assert main(["chaos", "--check", str(tmp_path / HISTORY)]) == 0
